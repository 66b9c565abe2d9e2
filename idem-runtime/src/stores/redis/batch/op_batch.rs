//! The operations that gather for one batch.

use std::sync::Arc;

use super::super::command::RedisCommand;
use super::super::op::Op;
use super::super::write::{EncodedWrite, WriteLayout};
use super::replies::{Replies, ReplyWaiter};
use crate::clock::Instant;

/// Largest number of operations in one batch.
const BATCH: usize = 256;
/// A batch with this many bytes of keys and values takes no more operations.
const BATCH_BYTES: usize = 256 * 1024;

/// An operation in a batch, and the index of its answer in [`Replies`].
pub(super) struct BatchEntry<T> {
    pub(super) slot: usize,
    pub(super) op: T,
}

/// A reservation or completion, whose bytes are in [`OpBatch::bytes`].
pub(super) type WriteEntry = BatchEntry<WriteLayout>;

/// The operations of one batch. The bytes of all operations share one buffer, so that an operation allocates nothing
/// before its batch is sent.
pub(super) struct OpBatch {
    pub(super) bytes: Vec<u8>,
    pub(super) reserves: Vec<WriteEntry>,
    pub(super) completions: Vec<WriteEntry>,
    pub(super) commands: Vec<BatchEntry<RedisCommand>>,
    /// Time at which the first operation joined.
    pub(super) opened: Instant,
    pub(super) replies: Arc<Replies>,
}

impl OpBatch {
    pub(super) fn new(opened: Instant) -> Self {
        let (bytes, replies) = (Vec::new(), Arc::default());
        let (reserves, completions, commands) = (Vec::new(), Vec::new(), Vec::new());
        Self { bytes, reserves, completions, commands, opened, replies }
    }

    pub(super) fn len(&self) -> usize {
        self.reserves.len() + self.completions.len() + self.commands.len()
    }

    pub(super) fn is_full(&self) -> bool {
        self.len() >= BATCH || self.bytes.len() >= BATCH_BYTES
    }

    /// Adds an operation, and encodes its record directly into the batch.
    pub(super) fn add(&mut self, op: Op<'_>) -> ReplyWaiter {
        let slot = self.replies.open();
        match op {
            Op::Reserve(write) => self.reserves.push(BatchEntry { slot, op: write.encode(&mut self.bytes) }),
            Op::Finish(write) => self.completions.push(BatchEntry { slot, op: write.encode(&mut self.bytes) }),
            Op::Renew(op) | Op::Write(op) | Op::Read(op) => self.commands.push(BatchEntry { slot, op }),
        }
        ReplyWaiter::new(&self.replies, slot)
    }

    /// Returns the bytes of a reservation or completion.
    pub(super) fn write(&self, entry: &WriteEntry) -> EncodedWrite<'_> {
        entry.op.write_in(&self.bytes)
    }

    /// Removes the operations whose callers are gone, except for the ends of attempts.
    pub(super) fn forget_gone(&mut self) {
        let is_gone = self.replies.gone();
        self.reserves.retain(|entry| !is_gone(entry.slot));
        self.commands.retain(|entry| entry.op.is_kept || !is_gone(entry.slot));
    }

    /// Keeps operations that return up to `records` records in total. Removes and returns the further operations that
    /// return a record.
    pub(super) fn split_off(&mut self, mut records: usize) -> Overflow {
        let reserves = self.reserves.split_off(records.min(self.reserves.len()));
        records -= self.reserves.len();
        let is_beyond = |entry: &mut BatchEntry<RedisCommand>| {
            let beyond = entry.op.returns_record && records == 0;
            records -= usize::from(entry.op.returns_record && !beyond);
            beyond
        };
        Overflow { reserves, commands: self.commands.extract_if(.., is_beyond).collect() }
    }

    /// Replaces the operations of this batch by operations of `overflow` that return up to `records` records.
    pub(super) fn refill(&mut self, overflow: &mut Overflow, records: usize) {
        let reserves = records.min(overflow.reserves.len());
        let commands = (records - reserves).min(overflow.commands.len());
        self.completions.clear();
        self.reserves.clear();
        self.reserves.extend(overflow.reserves.drain(..reserves));
        self.commands.clear();
        self.commands.extend(overflow.commands.drain(..commands));
        self.forget_gone();
    }

    /// Empties the batch for other operations, and keeps its capacity. Returns `None` if the capacity is unusually
    /// large.
    pub(super) fn emptied(mut self) -> Option<Self> {
        self.bytes.clear();
        self.reserves.clear();
        self.completions.clear();
        self.commands.clear();
        self.replies = Arc::default();
        (self.bytes.capacity() <= 2 * BATCH_BYTES).then_some(self)
    }
}

/// The operations of a batch that return records and are left for further exchanges.
pub(super) struct Overflow {
    reserves: Vec<WriteEntry>,
    commands: Vec<BatchEntry<RedisCommand>>,
}

impl Overflow {
    pub(super) fn is_empty(&self) -> bool {
        self.reserves.is_empty() && self.commands.is_empty()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = usize> {
        self.reserves.iter().map(|entry| entry.slot).chain(self.commands.iter().map(|entry| entry.slot))
    }
}
