//! What wrappers share: they are stores around another one, and pass most calls on.

use std::sync::{Arc, Weak};

use crate::store::Store;
use crate::sync::SharedOnce;

/// The upkeep handle of a wrapper around a store: the same wrapper around the store's upkeep handle, made once. If the
/// store has no separate upkeep handle, neither has the wrapper.
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
        // Not kept: it would keep itself alive.
        true => this.upgrade().expect("alive while it is borrowed"),
        false => Arc::clone(made.get_or_init(|| around(its))) as _,
    }
}
