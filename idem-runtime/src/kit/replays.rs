//! The share of replays among reservations: if most reservations are replays, a store reads the record before it
//! reserves the key.

use crate::sync::atomic::{AtomicUsize, Ordering};

/// The share of replays among recent reservations.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    /// The share in 256ths: 0 without replays, 256 if all recent reservations were replays.
    share: AtomicUsize,
}

impl Replays {
    /// Creates the share of a store without reservations so far.
    pub(crate) fn new() -> Self {
        Self { share: AtomicUsize::new(0) }
    }

    /// Returns whether at least half of the recent reservations were replays.
    pub(crate) fn are_expected(&self) -> bool {
        self.share.load(Ordering::Relaxed) >= 128
    }

    /// Adds `asked` reservations, of which `replays` were replays, to the share. If two tasks call `note` concurrently,
    /// the change of one of them may be lost.
    pub(crate) fn note(&self, replays: usize, asked: usize) {
        let before = self.share.load(Ordering::Relaxed);
        let now = 256 * replays / asked.max(1);
        // A batch of few reservations changes the share less, because a single replay or first run may be an exception.
        let weight = if asked > 8 { 4 } else { 8 };
        self.share.store(((weight - 1) * before + now) / weight, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn after_a_few_replays_in_a_row_more_replays_are_expected() {
        let replays = Replays::new();
        assert!(!replays.are_expected());
        for _ in 0..8 {
            replays.note(1, 1);
        }
        assert!(replays.are_expected());
        // One first run changes the share little, and a batch of first runs changes the share much.
        replays.note(0, 1);
        assert!(replays.are_expected());
        replays.note(0, 64);
        replays.note(0, 64);
        assert!(!replays.are_expected());
    }
}
