//! Table that counts repeated events, for events that no record counts.

use std::fmt;

use crate::sync::SharedOnce;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Number of slots. If two tags share a slot, only the later tag is counted.
const SLOTS: usize = 256;
/// Bits of a slot that hold the count. The other bits hold the tag.
const COUNT: u64 = 0xffff;

/// Counts by tag, in a fixed amount of memory. A later tag may overwrite the count of an earlier tag, whose count then
/// starts again.
pub(crate) struct TagCounts(SharedOnce<Box<[AtomicU64]>>);

impl TagCounts {
    /// Makes a table without counts.
    pub(crate) const fn new() -> Self {
        Self(SharedOnce::new())
    }

    /// Counts the event `tag` if `happened` is true; otherwise sets the count of `tag` to zero. Returns the count.
    pub(super) fn count_or_forget(&self, tag: u64, happened: bool) -> u32 {
        match happened {
            true => self.again(tag),
            false => {
                self.forget(tag);
                0
            }
        }
    }

    /// Counts one more event `tag`. Returns the number of events `tag` since the last [`forget`](TagCounts::forget).
    pub(crate) fn again(&self, tag: u64) -> u32 {
        let slots = self.0.get_or_init(|| (0..SLOTS).map(|_| AtomicU64::new(0)).collect());
        let slot = &slots[slot_of(tag)];
        let known = slot.load(Ordering::Relaxed);
        let before = if known & !COUNT == tag & !COUNT { known & COUNT } else { 0 };
        let count = (before + 1).min(COUNT);
        // If two threads count at the same time, one of the two events may be lost. A count that is too small only
        // shortens a pause.
        slot.store(tag & !COUNT | count, Ordering::Relaxed);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Sets the count of `tag` to zero.
    pub(crate) fn forget(&self, tag: u64) {
        let Some(slot) = self.0.get().map(|slots| &slots[slot_of(tag)]) else { return };
        if slot.load(Ordering::Relaxed) & !COUNT == tag & !COUNT {
            slot.store(0, Ordering::Relaxed);
        }
    }
}

/// Selects a slot by the low bits of the tag. The slot stores the other bits next to the count.
fn slot_of(tag: u64) -> usize {
    usize::try_from(tag & COUNT).unwrap_or(0) % SLOTS
}

impl fmt::Debug for TagCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TagCounts")
    }
}
