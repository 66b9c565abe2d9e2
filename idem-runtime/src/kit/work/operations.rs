//! Operations that every store in a database server sends in batches, and their order in a batch.

use std::ops::Range;
use std::time::Duration;

use crate::key::Key;
use crate::record::{Journal, Lease, Record, StoredResult};

/// Returns the indexes of a batch in the order of the keys. All processes lock rows in this order, so that two
/// processes rarely wait for each other.
pub(crate) fn by_key<T>(operations: &[T], key: impl Fn(&T) -> &str) -> Vec<usize> {
    // The vector holds the keys, too, so that the sort compares keys without a look-up in the operations.
    let mut order: Vec<(&str, usize)> = operations.iter().map(key).zip(0..).collect();
    order.sort_unstable();
    order.into_iter().map(|(_, place)| place).collect()
}

/// The journal of one attempt.
pub(crate) struct JournalRow {
    pub(crate) lease: Lease,
    pub(crate) journal: Journal,
}

impl JournalRow {
    /// Returns what the statement compares, keys first: rows are locked in the order of their keys.
    pub(crate) fn attempt(&self) -> (&str, &[u8], u32) {
        (self.lease.key.as_str(), &self.lease.owner.as_bytes()[..], self.lease.attempt)
    }

    /// Returns the approximate size of the operation in a statement.
    pub(crate) fn bytes(&self) -> usize {
        self.lease.key.as_str().len() + self.journal.bytes().len() + 80
    }
}

/// The journals of a batch, by attempt. A statement writes the longest journal of each attempt: given two, the server
/// would write any of them.
pub(crate) struct LongestJournals<'a> {
    /// Indexes of the batch in the order of the attempts.
    order: Vec<usize>,
    /// For each attempt, the places of its journals in `order`, and the longest journal.
    attempts: Vec<(Range<usize>, &'a JournalRow)>,
}

impl<'a> LongestJournals<'a> {
    pub(crate) fn new(rows: &[&'a JournalRow]) -> Self {
        let mut order: Vec<usize> = (0..rows.len()).collect();
        order.sort_unstable_by_key(|place| rows[*place].attempt());
        let (mut attempts, mut from) = (Vec::new(), 0);
        for of in order.chunk_by(|a, b| rows[*a].attempt() == rows[*b].attempt()) {
            let longest = of.iter().map(|place| rows[*place]).max_by_key(|row| row.journal.bytes().len());
            attempts.extend(longest.map(|longest| (from..from + of.len(), longest)));
            from += of.len();
        }
        Self { order, attempts }
    }

    /// Returns the longest journal of each attempt.
    pub(crate) fn rows(&self) -> Vec<&'a JournalRow> {
        self.attempts.iter().map(|(_, longest)| *longest).collect()
    }

    /// Returns for each journal of the batch whether the journal of its attempt was written.
    pub(crate) fn answers(&self, of_attempts: impl IntoIterator<Item = bool>) -> Vec<bool> {
        let mut written = vec![false; self.order.len()];
        for ((places, _), is_written) in self.attempts.iter().zip(of_attempts) {
            for place in &self.order[places.clone()] {
                written[*place] = is_written;
            }
        }
        written
    }
}

/// Returns the indexes of `ends` by statement. If a batch has several ends for one key, separate statements write them
/// in order: within one statement, any end could win.
pub(crate) fn in_turns(ends: &[&EndRow]) -> Vec<Vec<usize>> {
    let order = by_key(ends, |it| it.key.as_str());
    let mut turns: Vec<Vec<usize>> = Vec::new();
    for group in order.chunk_by(|a, b| ends[*a].key == ends[*b].key) {
        turns.resize_with(turns.len().max(group.len()), Vec::new);
        for (turn, place) in turns.iter_mut().zip(group) {
            turn.push(*place);
        }
    }
    turns
}

/// The end of one attempt.
pub(crate) struct EndRow {
    pub(crate) key: Key,
    pub(crate) record: Record,
    pub(crate) refund: i64,
    pub(crate) ttl: Duration,
}

impl EndRow {
    /// Returns the approximate size of the operation in a statement.
    pub(crate) fn bytes(&self) -> usize {
        self.key.as_str().len() + self.record.state.result().map_or(0, StoredResult::stored_bytes) + 80
    }
}
