//! Table that counts repeated events, for events that no record counts.

use std::fmt;

use crate::sync::SharedOnce;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Number of slots in a set. The tags of a set are kept in the order of their last events, latest first. A tag that the
/// set does not hold overwrites the last one, so up to this number of tags that share a set are all counted.
const WAYS: usize = 8;
/// Number of sets. The low bits of a tag select its set.
const SETS: usize = 128;
/// Bits of a slot that hold the count. The other bits hold the tag.
const COUNT: u64 = 0xffff;

/// Counts by tag, in a fixed amount of memory: 8 KiB from the first event on. A tag is forgotten, and its count then
/// starts again, if its set has seen eight other tags since its last event.
pub(crate) struct TagCounts(SharedOnce<Box<[Set]>>);

/// Tags that share their low bits, with their counts. Zero is an empty slot.
type Set = [AtomicU64; WAYS];

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
        let sets = self.0.get_or_init(|| (0..SETS).map(|_| Set::default()).collect());
        let set = &sets[set_of(tag)];
        // If two threads count in a set at the same time, an event of one of the two or a tag may be lost. A count that
        // is too small only shortens a pause.
        let (mut moved, mut before) = (0, 0);
        for slot in set {
            let known = slot.swap(moved, Ordering::Relaxed);
            if is_of(known, tag) {
                before = known & COUNT;
                break;
            }
            moved = known;
        }
        let count = (before + 1).min(COUNT);
        set[0].store(tag & !COUNT | count, Ordering::Relaxed);
        u32::try_from(count).unwrap_or(u32::MAX)
    }

    /// Sets the count of `tag` to zero. The tag keeps its slot: a key that fails and succeeds by turns would otherwise
    /// take another slot each time, and so displace the other tags of its set.
    pub(crate) fn forget(&self, tag: u64) {
        let Some(set) = self.0.get().map(|sets| &sets[set_of(tag)]) else { return };
        for slot in set {
            if is_of(slot.load(Ordering::Relaxed), tag) {
                slot.store(tag & !COUNT, Ordering::Relaxed);
            }
        }
    }
}

/// Selects a set by the low bits of the tag. The slots store the other bits next to the count.
fn set_of(tag: u64) -> usize {
    usize::try_from(tag & COUNT).unwrap_or(0) % SETS
}

/// Returns whether the content of a slot, `known`, counts `tag`.
fn is_of(known: u64, tag: u64) -> bool {
    known & !COUNT == tag & !COUNT
}

impl fmt::Debug for TagCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TagCounts")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_that_comes_and_goes_does_not_displace_another() {
        let counts = TagCounts::new();
        let [failing, recovering] = [1 << 16, 2 << 16];
        assert_eq!(set_of(failing), set_of(recovering));
        assert_eq!(counts.again(failing), 1);
        for _ in 0..2 * WAYS {
            assert_eq!(counts.count_or_forget(recovering, true), 1);
            assert_eq!(counts.count_or_forget(recovering, false), 0);
        }
        assert_eq!(counts.again(failing), 2);
    }
}
