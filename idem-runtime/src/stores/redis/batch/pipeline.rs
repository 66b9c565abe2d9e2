//! The commands of a batch, in the order in which their answers are read.

use std::ops::Range;

use redis::{Cmd, Pipeline};

use super::super::command::{RedisCommand, joined, with_source};
use super::super::terms::ExchangeTerms;
use super::super::write::{EncodedWrite, finish};
use super::op_batch::{BatchEntry, OpBatch, WriteEntry};

/// Largest number of keys in one script call. This number limits the time for which the call blocks the server.
const KEYS_AT_ONCE: usize = 64;
/// Largest value of a command that shares a script call with others, for the same reason.
const JOINED_BYTES: usize = 16 * 1024;

/// The first exchange of a batch: reservations, other commands, shared calls, script calls, comparisons.
pub(super) struct FirstExchange {
    pub(super) pipeline: Pipeline,
    pub(super) commands: Vec<SentCommand>,
    pub(super) shared: Vec<SharedCall>,
    /// Ranges of [`OpBatch::completions`], one for each script call.
    pub(super) calls: Vec<Range<usize>>,
    /// Completions that are sent as `SET … IFEQ`.
    pub(super) compared: Vec<WriteEntry>,
}

/// A command other than `SET` that is in this exchange.
pub(super) struct SentCommand {
    pub(super) slot: usize,
    /// Index of the command in its pipeline.
    at: usize,
    source: Option<&'static str>,
    pub(super) returns_record: bool,
}

impl SentCommand {
    /// Makes the same call with the source of its script, for a server that has forgotten the script; `None` if the
    /// command calls no script.
    pub(super) fn with_source(&self, pipeline: &Pipeline) -> Option<Cmd> {
        Some(with_source(pipeline.cmd_iter().nth(self.at)?, self.source?))
    }
}

/// A script call that several commands share.
pub(super) struct SharedCall {
    /// Indexes of the answers, in the order of the keys.
    pub(super) slots: Vec<usize>,
    /// Index of the call in its pipeline.
    at: usize,
    source: Option<&'static str>,
}

impl SharedCall {
    /// Adds the calls that `entries` share to `pipeline`.
    fn add(pipeline: &mut Pipeline, entries: &[BatchEntry<RedisCommand>]) -> Vec<Self> {
        let shared = entries.chunks(KEYS_AT_ONCE).map(|entries| {
            let call = Self {
                slots: entries.iter().map(|entry| entry.slot).collect(),
                at: pipeline.len(),
                source: entries[0].op.source,
            };
            pipeline.add_command(joined(entries.iter().map(|entry| &entry.op.command)));
            call
        });
        shared.collect()
    }

    /// Makes the same call with the source of its script, for a server that has forgotten the script.
    pub(super) fn with_source(&self, pipeline: &Pipeline) -> Option<Cmd> {
        Some(with_source(pipeline.cmd_iter().nth(self.at)?, self.source?))
    }
}

impl FirstExchange {
    /// Makes the commands of `batch`. If `compares`, completions that have expected bytes are sent as `SET … IFEQ`. If
    /// `looks_up`, all reservations are sent as one `MGET`, and the second exchange reserves the absent keys.
    pub(super) fn new(batch: &mut OpBatch, terms: &ExchangeTerms, compares: bool, looks_up: bool) -> Self {
        let is_compared = |entry: &mut WriteEntry| compares && entry.op.expected > 0;
        let by_server: Vec<WriteEntry> = batch.completions.extract_if(.., is_compared).collect();
        let calls: Vec<_> = chunks(batch.completions.len(), terms).collect();
        let others = batch.commands.len() + calls.len() + by_server.len();
        let mut pipeline = Pipeline::with_capacity(batch.reserves.len() + others);
        if looks_up {
            let mut command = Cmd::with_capacity(batch.reserves.len() + 1, batch.bytes.len());
            command.arg("MGET");
            for entry in &batch.reserves {
                command.arg(batch.write(entry).key);
            }
            pipeline.add_command(command);
        } else {
            for entry in &batch.reserves {
                pipeline.add_command(batch.write(entry).reserve());
            }
        }
        let mut commands = Vec::with_capacity(batch.commands.len());
        // Only the script for appends joins, so all of these call the same script.
        let joins = |entry: &mut BatchEntry<RedisCommand>| {
            entry.op.joins && entry.op.value_len <= JOINED_BYTES && !terms.one_key
        };
        let joining: Vec<_> = batch.commands.extract_if(.., joins).collect();
        for BatchEntry { slot, op } in batch.commands.drain(..) {
            let RedisCommand { command, source, returns_record, .. } = op;
            commands.push(SentCommand { slot, at: pipeline.len(), source, returns_record });
            pipeline.add_command(command);
        }
        let shared = SharedCall::add(&mut pipeline, &joining);
        for call in &calls {
            pipeline.add_command(finish_call(terms, batch, &batch.completions[call.clone()], false));
        }
        for entry in &by_server {
            pipeline.add_command(batch.write(entry).compare());
        }
        Self { pipeline, commands, shared, calls, compared: by_server }
    }
}

/// The second exchange of a batch: reservations of keys that the first exchange found absent, then repeated commands,
/// shared calls and script calls, whose scripts the server had forgotten.
#[derive(Default)]
pub(super) struct SecondExchange<'a> {
    pub(super) pipeline: Pipeline,
    pub(super) reserves: Vec<&'a WriteEntry>,
    /// Slots of the commands that are sent again.
    pub(super) commands: Vec<usize>,
    /// Slots of the shared calls that are sent again.
    pub(super) shared: Vec<Vec<usize>>,
    pub(super) calls: Vec<Range<usize>>,
}

/// Divides `len` completions into one range for each script call.
pub(super) fn chunks(len: usize, terms: &ExchangeTerms) -> impl Iterator<Item = Range<usize>> + use<> {
    let size = if terms.one_key { 1 } else { KEYS_AT_ONCE };
    (0..len).step_by(size).map(move |from| from..len.min(from + size))
}

/// Makes the script call that finishes some completions of a batch.
pub(super) fn finish_call(terms: &ExchangeTerms, batch: &OpBatch, entries: &[WriteEntry], with_source: bool) -> Cmd {
    let script = if terms.one_key { &terms.scripts.finish_one } else { &terms.scripts.finish };
    finish(script, with_source, &terms.channel, entries.iter().map(|entry| batch.write(entry)))
}

/// Makes the script call that finishes one record.
pub(super) fn finish_one(terms: &ExchangeTerms, write: EncodedWrite<'_>, with_source: bool) -> Cmd {
    finish(&terms.scripts.finish_one, with_source, &terms.channel, std::iter::once(write))
}
