//! Expectations about the next answers of a server, by its earlier ones.

use super::super::terms::ExchangeTerms;
use crate::kit::replays::Replays;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Limit of the bytes of records that one exchange may return, if each record is as large as the latest ones.
const ANSWER_BYTES: usize = 1024 * 1024;
/// Assumed size of a record before any has arrived, in bytes.
const FIRST_RECORD: usize = 64 * 1024;

/// Expectations about the answers over one connection.
pub(super) struct Expectations {
    /// Whether reservations mostly find a record.
    pub(super) replays: Replays,
    /// Number of the connection whose server does not support `SET … IFEQ`; 0 if there is none.
    plain_sets: AtomicU64,
    /// Size of the largest recent record, in bytes.
    record: AtomicUsize,
}

impl Expectations {
    pub(super) fn new(terms: &ExchangeTerms) -> Self {
        Self {
            replays: Replays::new(),
            plain_sets: AtomicU64::new(u64::from(!terms.compares)),
            record: AtomicUsize::new(FIRST_RECORD),
        }
    }

    /// Returns whether the server counts as knowing `SET … IFEQ`: by its version when the store was opened, until an
    /// answer shows otherwise. A new connection may lead to another server, so the option is tried again.
    pub(super) fn compares(&self, generation: u64) -> bool {
        generation != self.plain_sets.load(Ordering::Relaxed)
    }

    /// Notes that the server of this connection does not support `SET … IFEQ`.
    pub(super) fn note_plain_sets(&self, generation: u64) {
        self.plain_sets.store(generation, Ordering::Relaxed);
    }

    /// Returns the number of records that one exchange may return.
    pub(super) fn records_at_once(&self) -> usize {
        (ANSWER_BYTES / self.record.load(Ordering::Relaxed).max(1)).max(1)
    }

    /// Notes the largest record among some answers, in bytes. The expected size falls by at most half, so that small
    /// records are expected again only after a while.
    pub(super) fn note_largest(&self, largest: usize) {
        let before = self.record.load(Ordering::Relaxed);
        let now = largest.max(before / 2);
        if now != before {
            self.record.store(now, Ordering::Relaxed);
        }
    }
}
