//! Notes of calls for those who poll on the same thread: the library has refused a call, or a call begins to wait.

use std::cell::Cell;

thread_local! {
    /// True if the library has temporarily refused a call in the body that is being polled on this thread.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
    /// True if a call has begun to wait on this thread since the last look.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Notes that the library temporarily refuses a call: the body that made the call, if any, may fail only because of
/// that.
pub(super) fn note_refusal() {
    REFUSED.set(true);
}

/// Collects the refusals of one body, until the guard is dropped.
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

/// Notes that a call begins to wait for another attempt, for another item of its batch, or for a store that does not
/// answer.
pub(super) fn waits() {
    WAITS.set(true);
}

/// Returns whether a call that was polled on this thread since the last look [waits], and clears that note.
#[cfg(feature = "tower")]
pub(crate) fn has_begun_to_wait() -> bool {
    WAITS.replace(false)
}
