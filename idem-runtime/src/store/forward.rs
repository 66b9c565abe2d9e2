//! Stores that forward calls to another store.

use std::sync::Arc;

use super::Store;

/// Writes the named methods of [`Store`](crate::Store), each of which forwards to another store. A wrapper implements
/// the remaining methods itself. The trait has no default bodies, so the compiler reports a forgotten method.
///
/// # Examples
/// ```
/// use std::sync::Arc;
///
/// use idem_runtime::store::{Finish, Lease, StoreFuture, Verdict, forward};
/// use idem_runtime::{MemoryStore, Store};
///
/// /// Counts the bytes of results.
/// #[derive(Clone, Debug)]
/// struct Counted {
///     inner: MemoryStore,
///     bytes: Arc<std::sync::atomic::AtomicUsize>,
/// }
///
/// impl Store for Counted {
///     forward! { |store| store.inner => namespace, response_timeout, context, reserve, begin, renew, append, step_values, release, wait, inspect, decide, purge, list, ping }
///
///     fn handle(&self) -> Arc<dyn Store> {
///         Arc::new(self.clone())
///     }
///
///     fn upkeep(&self) -> Arc<dyn Store> {
///         self.handle()
///     }
///
///     fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
///         self.bytes.fetch_add(finish.result().stored_bytes(), std::sync::atomic::Ordering::Relaxed);
///         self.inner.finish(lease, finish)
///     }
/// }
/// ```
#[doc(hidden)]
#[macro_export]
macro_rules! __forward {
    (|$this:ident| $store:expr => $($method:ident),+ $(,)?) => {
        $($crate::__forward! { @$method $this ($store) })+
    };
    (@handle $this:ident $store:tt) => {
        fn handle(&self) -> ::std::sync::Arc<dyn $crate::store::Store> {
            let $this = self;
            $store.handle()
        }
    };
    (@upkeep $this:ident $store:tt) => {
        fn upkeep(&self) -> ::std::sync::Arc<dyn $crate::store::Store> {
            let $this = self;
            $store.upkeep()
        }
    };
    (@namespace $this:ident $store:tt) => {
        fn namespace(&self) -> &str {
            let $this = self;
            $store.namespace()
        }
    };
    (@response_timeout $this:ident $store:tt) => {
        fn response_timeout(&self) -> ::std::time::Duration {
            let $this = self;
            $store.response_timeout()
        }
    };
    (@context $this:ident $store:tt) => {
        fn context(&self) -> &$crate::store::StoreContext {
            let $this = self;
            $store.context()
        }
    };
    (@reserve $this:ident $store:tt) => {
        fn reserve<'a>(
            &'a self,
            request: &'a $crate::store::ReserveRequest,
        ) -> $crate::store::StoreFuture<'a, $crate::store::Reservation> {
            let $this = self;
            $store.reserve(request)
        }
    };
    (@begin $this:ident $store:tt) => {
        fn begin<'a>(
            &'a self,
            lease: &'a $crate::store::Lease,
        ) -> $crate::store::StoreFuture<'a, $crate::store::Verdict> {
            let $this = self;
            $store.begin(lease)
        }
    };
    (@renew $this:ident $store:tt) => {
        fn renew<'a>(
            &'a self,
            leases: &'a [$crate::store::Lease],
            answer: &'a $crate::store::Answers<'a>,
        ) -> $crate::store::StoreFuture<'a, ()> {
            let $this = self;
            $store.renew(leases, answer)
        }
    };
    (@append $this:ident $store:tt) => {
        fn append<'a>(
            &'a self,
            lease: &'a $crate::store::Lease,
            journal: &'a $crate::store::Journal,
        ) -> $crate::store::StoreFuture<'a, $crate::store::Verdict> {
            let $this = self;
            $store.append(lease, journal)
        }
    };
    (@step_values $this:ident $store:tt) => {
        fn step_values(&self) -> ::std::option::Option<&dyn $crate::store::StepValues> {
            let $this = self;
            $store.step_values()
        }
    };
    (@finish $this:ident $store:tt) => {
        fn finish<'a>(
            &'a self,
            lease: &'a $crate::store::Lease,
            finish: &'a $crate::store::Finish,
        ) -> $crate::store::StoreFuture<'a, $crate::store::Verdict> {
            let $this = self;
            $store.finish(lease, finish)
        }
    };
    (@release $this:ident $store:tt) => {
        fn release<'a>(
            &'a self,
            lease: &'a $crate::store::Lease,
            release: $crate::store::Release,
        ) -> $crate::store::StoreFuture<'a, $crate::store::Verdict> {
            let $this = self;
            $store.release(lease, release)
        }
    };
    (@wait $this:ident $store:tt) => {
        fn wait<'a>(
            &'a self,
            key: &'a $crate::key::Key,
            attempt: u32,
            at_most: ::std::time::Duration,
        ) -> $crate::store::StoreFuture<'a, ::std::option::Option<$crate::store::Inspection>> {
            let $this = self;
            $store.wait(key, attempt, at_most)
        }
    };
    (@inspect $this:ident $store:tt) => {
        fn inspect<'a>(
            &'a self,
            key: &'a $crate::key::Key,
        ) -> $crate::store::StoreFuture<'a, ::std::option::Option<$crate::store::Inspection>> {
            let $this = self;
            $store.inspect(key)
        }
    };
    (@decide $this:ident $store:tt) => {
        fn decide<'a>(
            &'a self,
            decision: &'a $crate::store::Decision,
        ) -> $crate::store::StoreFuture<'a, $crate::store::DecisionAnswer> {
            let $this = self;
            $store.decide(decision)
        }
    };
    (@purge $this:ident $store:tt) => {
        fn purge(&self, batch: u32) -> $crate::store::StoreFuture<'_, u64> {
            let $this = self;
            $store.purge(batch)
        }
    };
    (@list $this:ident $store:tt) => {
        fn list<'a>(&'a self, filter: &'a $crate::store::Filter) -> $crate::store::StoreFuture<'a, $crate::store::Page> {
            let $this = self;
            $store.list(filter)
        }
    };
    (@ping $this:ident $store:tt) => {
        fn ping(&self) -> $crate::store::StoreFuture<'_, ()> {
            let $this = self;
            $store.ping()
        }
    };
}
#[doc(inline)]
pub use crate::__forward as forward;

/// Implements `Store` for a store of the library whose handles share their state.
#[allow(unused_macros, reason = "unused without a store of the library")]
macro_rules! store_of_shared {
    ($store:ident) => {
        impl $crate::store::Store for $store {
            $crate::store::forward! {
                |store| store.0 =>
                handle, upkeep, namespace, response_timeout, context, reserve, begin, renew, append, step_values, finish, release, wait, inspect,
                decide, purge, list, ping
            }
        }

        impl From<$store> for ::std::sync::Arc<dyn $crate::store::Store> {
            fn from(store: $store) -> Self {
                store.0
            }
        }
    };
}
#[allow(unused_imports, reason = "unused without a store of the library")]
pub(crate) use store_of_shared;

macro_rules! pointers {
    ($($pointer:ident)*) => { $(
        impl<S: Store + ?Sized> Store for $pointer<S> {
            forward! {
                |store| store.as_ref() =>
                handle, upkeep, namespace, response_timeout, context, reserve, begin, renew, append, step_values, finish, release, wait, inspect,
                decide, purge, list, ping
            }
        }
    )* };
}

pointers!(Arc Box);
