//! Notes that a call leaves on its thread for the code that polls the call: the library refused a call, a call waits,
//! or a reconciler has answered.

use std::cell::Cell;

thread_local! {
    /// True if the library has temporarily refused a call in the body that is being polled on this thread.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
    /// True if a call on this thread has begun to wait since [`has_begun_to_wait`] last returned.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Records that the library temporarily refuses a call. If the enclosing body fails, the refusal may be the only cause.
pub(super) fn note_refusal() {
    REFUSED.set(true);
}

/// Collects the refusals of calls in one body until the guard is dropped.
pub(super) struct Refusals<'a> {
    inside: &'a mut bool,
    outside: bool,
}

impl<'a> Refusals<'a> {
    pub(super) fn enter(inside: &'a mut bool) -> Self {
        let outside = REFUSED.replace(*inside);
        Self { inside, outside }
    }
}

impl Drop for Refusals<'_> {
    fn drop(&mut self) {
        *self.inside = REFUSED.replace(self.outside);
    }
}

/// Records that a call begins to wait for another attempt, for another item of its batch, or for a store that does not
/// answer.
pub(super) fn waits() {
    WAITS.set(true);
}

/// Returns whether a call on this thread has begun to wait (see [`waits`]) since this function last returned.
#[cfg(feature = "tower")]
pub(crate) fn has_begun_to_wait() -> bool {
    WAITS.replace(false)
}
