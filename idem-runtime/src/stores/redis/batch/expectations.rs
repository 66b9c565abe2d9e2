//! Expectations about the next answers of a server, from its earlier answers.

use super::super::terms::ExchangeTerms;
use crate::kit::replays::Replays;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Largest sum of the expected sizes of the records that one exchange returns, in bytes.
const ANSWER_BYTES: usize = 1024 * 1024;
/// Assumed size of a record before any has arrived, in bytes.
const FIRST_RECORD: usize = 64 * 1024;

/// Expectations about the answers over one connection.
pub(super) struct Expectations {
    /// Estimate whether most reservations find a record.
    pub(super) replays: Replays,
    /// Generation of the connection whose server refused `SET … IFEQ`; 0 if no server has refused it.
    plain_sets: AtomicU64,
    /// Expected size of a record, in bytes: the size of the largest record in the latest answers, or more if earlier
    /// records were larger.
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

    /// Returns whether the server of the connection `generation` is assumed to support `SET … IFEQ`. For the first
    /// connection, the version of the server decides. After a server has refused the option, its connection is not
    /// asked again. A new connection may lead to another server, so the store tries the option again.
    pub(super) fn compares(&self, generation: u64) -> bool {
        generation != self.plain_sets.load(Ordering::Relaxed)
    }

    /// Notes that the server of connection `generation` does not support `SET … IFEQ`.
    pub(super) fn note_plain_sets(&self, generation: u64) {
        self.plain_sets.store(generation, Ordering::Relaxed);
    }

    /// Returns the number of records that one exchange may return.
    pub(super) fn records_at_once(&self) -> usize {
        (ANSWER_BYTES / self.record.load(Ordering::Relaxed).max(1)).max(1)
    }

    /// Notes the size of the largest record in some answers, in bytes. Halves the expected size at most, so that one
    /// exchange of small records does not hide that large records are frequent.
    pub(super) fn note_largest(&self, largest: usize) {
        let before = self.record.load(Ordering::Relaxed);
        let now = largest.max(before / 2);
        if now != before {
            self.record.store(now, Ordering::Relaxed);
        }
    }
}
