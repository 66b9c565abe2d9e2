//! The records of the attempts that this process runs, as it has written them: a write then needs no read before it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;

use crate::clock::Instant;
use crate::record::OwnerToken;
use crate::sync::{Mutex, lock};

/// Largest number of records in one generation of the table.
const REMEMBERED: usize = 4096;
/// Size of the largest record in the table, in bytes. Of a record with a larger journal the table has only the number,
/// and the record is read again before each write.
const LARGEST: usize = 8 * 1024;

/// A pending record of this process, as its latest write left it.
#[derive(Clone, Debug)]
pub(super) struct HeldRecord {
    /// Subject of the record.
    pub(super) subject: Box<str>,
    /// Number of a message that the stream has stored. The stream has this message or a later one.
    pub(super) sequence: u64,
    /// The record; empty if it has to be read.
    pub(super) body: Bytes,
    /// Time before which the write was sent, and so before the leader stored the record.
    pub(super) sent: Instant,
    /// Retention of the record, from the time at which the leader stored it.
    pub(super) kept: Duration,
    /// Number of [`HeldRecords::epoch`] when the write was sent.
    pub(super) epoch: u64,
}

impl HeldRecord {
    /// Returns whether an answer with message number `sequence`, or with no message (0), is from before this write. A
    /// server that can't read a message answers that there is none, and a server that has lost the lead without
    /// noticing answers with an earlier message.
    pub(super) fn is_later_than(&self, sequence: u64, now: Instant) -> bool {
        sequence < self.sequence && now.saturating_since(self.sent) < self.kept
    }
}

/// The pending records of this process, by owner token, in two generations. A full generation replaces the earlier one,
/// so the table forgets the attempts that were renewed least recently, and is bounded.
#[derive(Debug, Default)]
pub(super) struct HeldRecords {
    generations: Mutex<[HashMap<OwnerToken, HeldRecord>; 2]>,
    /// Number of times that a connection was opened again. A server that has restarted may have lost its latest
    /// messages, and use their numbers for others.
    epoch: AtomicU64,
}

impl HeldRecords {
    pub(super) fn get(&self, owner: OwnerToken) -> Option<HeldRecord> {
        let generations = lock(&self.generations);
        generations.iter().find_map(|generation| generation.get(&owner)).cloned()
    }

    pub(super) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Has every record read again before its next write.
    pub(super) fn doubt_all(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Has the record read again before its next write.
    pub(super) fn doubt(&self, owner: OwnerToken) {
        for generation in &mut *lock(&self.generations) {
            if let Some(record) = generation.get_mut(&owner) {
                record.body.clear();
            }
        }
    }

    pub(super) fn set(&self, owner: OwnerToken, mut record: HeldRecord) {
        if record.body.len() > LARGEST {
            record.body.clear();
        }
        let mut generations = lock(&self.generations);
        if generations[0].len() >= REMEMBERED && !generations[0].contains_key(&owner) {
            generations.swap(0, 1);
            generations[0].clear();
        }
        let [young, old] = &mut *generations;
        young.insert(owner, record);
        old.remove(&owner);
    }

    pub(super) fn forget(&self, owner: OwnerToken) {
        for generation in &mut *lock(&self.generations) {
            generation.remove(&owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(n: usize) -> OwnerToken {
        OwnerToken::from_bytes((n as u128).to_be_bytes())
    }

    fn record(sequence: u64, bytes: usize) -> HeldRecord {
        let (sent, kept) = (Instant::new(Duration::ZERO), Duration::from_secs(60));
        HeldRecord { subject: "s".into(), sequence, body: vec![0; bytes].into(), sent, kept, epoch: 0 }
    }

    #[test]
    fn the_table_is_bounded_and_forgets_what_was_written_least_recently() {
        let table = HeldRecords::default();
        for n in 0..10 * REMEMBERED {
            table.set(owner(n), record(1, 10));
            // The first attempt is renewed all the time.
            table.set(owner(0), record(n as u64, 10));
        }
        let held: usize = lock(&table.generations).iter().map(HashMap::len).sum();
        assert!(held <= 2 * REMEMBERED, "{held}");
        assert_eq!(table.get(owner(0)).map(|record| record.sequence), Some(10 * REMEMBERED as u64 - 1));
        assert!(table.get(owner(1)).is_none());
    }

    #[test]
    fn only_the_number_of_a_large_or_doubtful_record_is_known() {
        let table = HeldRecords::default();
        table.set(owner(1), record(1, 10));
        table.set(owner(1), record(2, LARGEST + 1));
        table.set(owner(2), record(3, 10));
        table.doubt(owner(2));
        for (n, sequence) in [(1, 2), (2, 3)] {
            let held = table.get(owner(n)).expect("held");
            assert!(held.sequence == sequence && held.body.is_empty(), "{held:?}");
        }
    }

    #[test]
    fn an_answer_from_before_a_write_is_recognised_while_the_record_is_kept() {
        let held = record(7, 10);
        let at = |seconds| Instant::new(Duration::from_secs(seconds));
        assert!(held.is_later_than(0, at(59)) && held.is_later_than(6, at(59)));
        assert!(!held.is_later_than(0, at(60)), "the retention may have ended");
        assert!(!held.is_later_than(7, at(0)) && !held.is_later_than(8, at(0)));
    }
}
