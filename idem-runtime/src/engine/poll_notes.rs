//! Notes that a call leaves on its thread for the code that polls the call: the library refused a call, a call waits,
//! or a reconciler has answered.

use std::cell::Cell;
use std::time::Duration;

thread_local! {
    /// Notes about the body that is being polled on this thread.
    static NOTES: Cell<PollNotes> = const { Cell::new(PollNotes::NEW) };
    /// Pause until the next question, as the reconciler on this thread has just requested it.
    static ASK_AGAIN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// True if a call on this thread has begun to wait since [`has_begun_to_wait`] last returned.
    static WAITS: Cell<bool> = const { Cell::new(false) };
}

/// Notes about one body.
#[derive(Clone, Copy)]
pub(super) struct PollNotes {
    /// True if the library has temporarily refused a call in the body.
    pub(super) refused: bool,
    /// True if the body has written its journal.
    pub(super) journaled: bool,
    pub(super) doubt: DoubtStage,
}

/// Progress of a reconciler, which runs before the body of its attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DoubtStage {
    /// No earlier effect is in doubt, or the reconciler has answered that nothing happened: the body runs.
    Settled,
    /// The reconciler is asked. `may_run` is false if `max_attempts` allows no further body.
    Asked { may_run: bool },
    /// The reconciler has supplied the result.
    Done,
    /// The reconciler has ended without an answer.
    Unresolved,
    /// The reconciler has answered that nothing happened, and `max_attempts` allows no further body.
    Exhausted,
}

impl PollNotes {
    /// Notes before the first poll of a body.
    pub(super) const NEW: Self = Self { refused: false, journaled: false, doubt: DoubtStage::Settled };
}

/// Records that the library temporarily refuses a call. If the enclosing body fails, the refusal may be the only cause.
pub(super) fn note_refusal() {
    NOTES.set(PollNotes { refused: true, ..NOTES.get() });
}

/// Records that the body writes its journal.
pub(super) fn note_journaled() {
    NOTES.set(PollNotes { journaled: true, ..NOTES.get() });
}

/// Returns the progress of the reconciler of the body that is being polled on this thread.
pub(super) fn doubt() -> DoubtStage {
    NOTES.get().doubt
}

/// Records the progress of the reconciler of the body that is being polled on this thread.
pub(super) fn note_doubt(doubt: DoubtStage) {
    NOTES.set(PollNotes { doubt, ..NOTES.get() });
}

/// Records that the reconciler has ended without an answer, and may know more after `pause`.
pub(super) fn note_unresolved(pause: Duration) {
    note_doubt(DoubtStage::Unresolved);
    ASK_AGAIN.set(pause);
}

/// Returns the pause of the last [`note_unresolved`] on this thread.
pub(super) fn ask_again() -> Duration {
    ASK_AGAIN.get()
}

/// Collects the notes about one body until the guard is dropped.
pub(super) struct NotesGuard<'a> {
    inside: &'a mut PollNotes,
    outside: PollNotes,
}

impl<'a> NotesGuard<'a> {
    pub(super) fn enter(inside: &'a mut PollNotes) -> Self {
        let outside = NOTES.replace(*inside);
        Self { inside, outside }
    }
}

impl Drop for NotesGuard<'_> {
    fn drop(&mut self) {
        *self.inside = NOTES.replace(self.outside);
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
