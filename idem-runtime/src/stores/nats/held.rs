//! The records of the attempts that this process runs, as it has written them: a write then needs no read before it.

use std::collections::HashMap;

use bytes::Bytes;

use crate::clock::Instant;
use crate::record::OwnerToken;
use crate::sync::{Mutex, lock};

/// Largest number of records in one generation of the table.
const REMEMBERED: usize = 4096;
/// Size of the largest record in the table, in bytes. A record with a larger journal is read again before each write.
const LARGEST: usize = 8 * 1024;

/// A pending record of this process, as its latest write left it.
#[derive(Clone, Debug)]
pub(super) struct HeldRecord {
    pub(super) sequence: u64,
    pub(super) body: Bytes,
    /// Time before which the write was sent, and so before the leader stored the record.
    pub(super) sent: Instant,
}

/// The pending records of this process, by owner token, in two generations. A full generation replaces the earlier one,
/// so the table forgets the attempts that were renewed least recently, and is bounded.
#[derive(Debug, Default)]
pub(super) struct HeldRecords(Mutex<[HashMap<OwnerToken, HeldRecord>; 2]>);

impl HeldRecords {
    pub(super) fn get(&self, owner: OwnerToken) -> Option<HeldRecord> {
        let generations = lock(&self.0);
        generations.iter().find_map(|generation| generation.get(&owner)).cloned()
    }

    pub(super) fn set(&self, owner: OwnerToken, record: HeldRecord) {
        if record.body.len() > LARGEST {
            return self.forget(owner);
        }
        let mut generations = lock(&self.0);
        if generations[0].len() >= REMEMBERED && !generations[0].contains_key(&owner) {
            generations.swap(0, 1);
            generations[0].clear();
        }
        let [young, old] = &mut *generations;
        young.insert(owner, record);
        old.remove(&owner);
    }

    pub(super) fn forget(&self, owner: OwnerToken) {
        for generation in &mut *lock(&self.0) {
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
        HeldRecord { sequence, body: vec![0; bytes].into(), sent: Instant::new(std::time::Duration::ZERO) }
    }

    #[test]
    fn the_table_is_bounded_and_forgets_what_was_written_least_recently() {
        let table = HeldRecords::default();
        for n in 0..10 * REMEMBERED {
            table.set(owner(n), record(1, 10));
            // The first attempt is renewed all the time.
            table.set(owner(0), record(n as u64, 10));
        }
        let held: usize = lock(&table.0).iter().map(HashMap::len).sum();
        assert!(held <= 2 * REMEMBERED, "{held}");
        assert_eq!(table.get(owner(0)).map(|record| record.sequence), Some(10 * REMEMBERED as u64 - 1));
        assert!(table.get(owner(1)).is_none());
    }

    #[test]
    fn a_record_that_has_grown_is_forgotten() {
        let table = HeldRecords::default();
        table.set(owner(1), record(1, 10));
        table.set(owner(1), record(2, LARGEST + 1));
        assert!(table.get(owner(1)).is_none(), "the number of the earlier message is out of date");
    }
}
