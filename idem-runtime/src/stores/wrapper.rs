//! Code that the wrappers share. A wrapper is a store around another store, and passes most calls on to it.

use std::sync::{Arc, Weak};

use crate::store::Store;
use crate::sync::SharedOnce;

/// Returns the upkeep handle of a wrapper, through which the library renews leases and makes late writes. The upkeep
/// handle is another wrapper of the same type, around the upkeep handle of the inner store, and is made at its first
/// use. If the inner store has no separate upkeep handle, the wrapper returns its own handle.
pub(crate) fn upkeep<W: Store>(
    this: &Weak<W>,
    inner: &Arc<dyn Store>,
    made: &SharedOnce<Arc<W>>,
    around: impl FnOnce(Arc<dyn Store>) -> Arc<W>,
) -> Arc<dyn Store> {
    if let Some(made) = made.get() {
        return Arc::clone(made) as _;
    }
    let its = inner.upkeep();
    match Arc::ptr_eq(&its, inner) {
        // This handle is not stored in `made`: the wrapper would hold a reference to itself and never be dropped.
        true => this.upgrade().expect("a borrowed store is alive"),
        false => Arc::clone(made.get_or_init(|| around(its))) as _,
    }
}
