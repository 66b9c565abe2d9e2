//! Whether reservations mostly turn out to be replays: then a store looks before it reserves.

use crate::sync::atomic::{AtomicUsize, Ordering};

/// The share of replays among recent reservations.
#[derive(Debug, Default)]
pub(crate) struct Replays {
    /// In 256ths.
    share: AtomicUsize,
}

impl Replays {
    /// None so far.
    pub(crate) fn new() -> Self {
        Self { share: AtomicUsize::new(0) }
    }

    /// Whether most recent reservations were replays.
    pub(crate) fn are_expected(&self) -> bool {
        self.share.load(Ordering::Relaxed) >= 128
    }

    /// Notes how many of `asked` reservations were replays. Two tasks at once may lose one of the notes.
    pub(crate) fn note(&self, replays: usize, asked: usize) {
        let before = self.share.load(Ordering::Relaxed);
        let now = 256 * replays / asked.max(1);
        // A lone replay among first runs, or a first run among replays, says little.
        let weight = if asked > 8 { 4 } else { 8 };
        self.share.store(((weight - 1) * before + now) / weight, Ordering::Relaxed);
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    #[test]
    fn a_few_replays_in_a_row_are_expected_to_go_on() {
        let replays = Replays::new();
        assert!(!replays.are_expected());
        for _ in 0..8 {
            replays.note(1, 1);
        }
        assert!(replays.are_expected());
        // One first run says little, a batch of them much.
        replays.note(0, 1);
        assert!(replays.are_expected());
        replays.note(0, 64);
        replays.note(0, 64);
        assert!(!replays.are_expected());
    }
}
