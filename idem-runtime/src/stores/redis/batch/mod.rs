//! Sends the operations of many tasks over one connection.
//!
//! - A lone command never waits: while nothing is in flight, it goes straight to the connection, driven by its caller.
//! - Otherwise operations gather, and a few *lanes* (spawned tasks) each send all gathered operations as one pipeline:
//!   one write, one answer to read, one wake-up. A lane takes the operations that are there; it never waits for more.
//! - A completion is `SET … IFEQ` with the bytes that the reservation wrote, if the server supports that option and the
//!   caller has the bytes. If the bytes differ (a duplicate waits for the record, or another attempt holds it), a
//!   script decides.
//! - Gathered completions for scripts become one call for up to [`FINISHED_AT_ONCE`] keys.
//! - Gathered reservations are first looked up with one `MGET` while most turn out to be replays: a tenth of the work
//!   for the server. Absent keys are then reserved. An existing value is the answer that `SET … NX GET` would have
//!   given.
//! - A batch is limited by the size of its requests, and by the size of its answers as estimated from the latest ones.
//! - A batch belongs to its lane. If a caller goes away before its operation is sent, the operation is dropped, unless
//!   it ends an attempt: the end of an attempt is handed over.
//! - If replicas have to confirm, each exchange ends with a write of its own and `WAIT`, on the same connection.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::{Cmd, Pipeline, RedisWrite, ServerError, Value};

use super::failure::{ErrorReply, ExchangeFailure};
use super::limits::SURE;
use super::place::ServerConnection;
use super::scripts::{Script, Scripts, TOUCH};
use crate::clock::{Clock, Instant};
use crate::kit::replays::Replays;
use crate::record::Record;
use crate::record::format::{self, millis};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, MutexGuard, lock};

#[cfg(all(test, shuttle))]
mod interleavings;

/// Largest number of batches in flight. First runs keep the server busy with scripts, so one batch should always be
/// ready for it. Replays keep the client busy, and more batches would only be smaller.
const LANES: usize = 3;
const LANES_FOR_REPLAYS: usize = 2;
/// Largest number of operations in one batch.
const BATCH: usize = 256;
/// A batch with this many bytes of keys and values takes no more operations.
const BATCH_BYTES: usize = 256 * 1024;
/// Limit of the bytes of records that one exchange may return, if each record is as large as the latest ones.
const ANSWER_BYTES: usize = 1024 * 1024;
/// Assumed size of a record before any has arrived, in bytes.
const FIRST_RECORD: usize = 64 * 1024;
/// Number of keys in one script call. Limits the time for which the server does nothing else.
const FINISHED_AT_ONCE: usize = 64;
/// A batch with at least this many reservations looks up its keys before it reserves, if it expects replays.
const LOOK_FIRST: usize = 8;
/// Reason why an operation was not sent.
const STALLED: &str = "the server did not answer what was sent before";

pub(super) type OpAnswer = Result<Value, ExchangeFailure>;

/// `Ok` if enough replicas have the written state; otherwise the server's reason, if it gave one.
type ReplicationResult = Result<(), Option<Arc<str>>>;

/// Turns one reply of the server into the answer of its operation.
fn answer(value: Value, replicated: &ReplicationResult) -> OpAnswer {
    match (value, replicated) {
        (Value::ServerError(error), _) => Err(ExchangeFailure::from(&error)),
        (value, Ok(())) => Ok(value),
        (value, Err(why)) => Err(ExchangeFailure::Unreplicated(Box::new(value), why.clone())),
    }
}

/// Number of replicas that must have a write before its answer counts, and the time that the server waits for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replicas {
    pub(super) count: usize,
    pub(super) within: Duration,
}

impl Replicas {
    /// Returns the time limit of an exchange that ends in `WAIT`, including one queued before it.
    pub(super) fn exchange(self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.within.saturating_mul(2))
    }
}

/// Settings that all connections of a store share.
#[derive(Clone)]
pub(super) struct BatchTerms {
    pub(super) clock: Arc<dyn Clock>,
    /// Time limit of one exchange.
    pub(super) timeout: Duration,
    /// Channel on which ends of attempts are published.
    pub(super) channel: Arc<str>,
    pub(super) scripts: Arc<Scripts>,
    /// True if a command may name only one key, as in a cluster.
    pub(super) one_key: bool,
    /// True if the first server that was asked supports `SET … IFEQ`.
    pub(super) compares: bool,
}

/// A command, and how to treat it.
#[derive(Clone)]
pub(super) struct RedisCommand {
    command: Cmd,
    /// Source of the script that the command calls, for a server that has forgotten it.
    script: Option<&'static str>,
    /// True if the answer may be a record.
    brings_record: bool,
    /// True if the command is sent even if its caller is gone.
    is_kept: bool,
}

impl RedisCommand {
    /// Makes a command that calls no script.
    pub(super) fn plain(command: Cmd) -> Self {
        Self { command, script: None, brings_record: false, is_kept: false }
    }

    /// Calls `script` with these keys and arguments.
    pub(super) fn script<'n>(
        script: &Script,
        keys: impl ExactSizeIterator<Item = Name<'n>>,
        args: impl FnOnce(&mut Cmd),
    ) -> Self {
        let mut command = Cmd::with_capacity(3 + 3 * keys.len(), 64 + 128 * keys.len());
        command.arg("EVALSHA").arg(&script.sha).arg(keys.len());
        keys.for_each(|key| command.write_arg_fmt(key));
        args(&mut command);
        Self { command, script: Some(script.source), brings_record: false, is_kept: false }
    }

    /// Marks the answer as one that may be a record.
    pub(super) fn that_brings_a_record(self) -> Self {
        Self { brings_record: true, ..self }
    }

    /// Marks the command to be sent even if its caller is gone.
    pub(super) fn that_is_kept(self) -> Self {
        Self { is_kept: true, ..self }
    }
}

/// Returns the same call with the source of its script, which loads it.
fn with_source(call: &Cmd, source: &str) -> Cmd {
    let mut command = Cmd::new();
    command.arg("EVAL").arg(source);
    for argument in call.args_iter().skip(2) {
        if let redis::Arg::Simple(argument) = argument {
            command.arg(argument);
        }
    }
    command
}

/// The name of a key at the server, in two parts that are joined only when it is sent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name<'a> {
    pub(super) prefix: &'a str,
    pub(super) key: &'a str,
}

impl Name<'_> {
    fn len(&self) -> usize {
        self.prefix.len() + self.key.len()
    }

    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(self.prefix.as_bytes());
        bytes.extend_from_slice(self.key.as_bytes());
    }
}

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.prefix)?;
        f.write_str(self.key)
    }
}

/// A reservation that is not written yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingReservation<'a> {
    pub(super) name: Name<'a>,
    pub(super) record: &'a Record,
    pub(super) ttl_ms: u64,
}

impl PendingReservation<'_> {
    fn write(&self, bytes: &mut Vec<u8>) -> Lengths {
        bytes.reserve(self.name.len() + format::len(self.record));
        self.name.write(bytes);
        let value_at = bytes.len();
        format::write(self.record, bytes);
        Lengths { key: self.name.len(), value: bytes.len() - value_at, pending: 0 }
    }
}

/// A completion that is not written yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct PendingCompletion<'a> {
    pub(super) name: Name<'a>,
    pub(super) record: &'a Record,
    /// Time of the reservation, in milliseconds since 1970; `None` if its record must have changed since then.
    pub(super) reserved_at: Option<u64>,
    /// The record as the reservation wrote it; `None` if it must have changed, or if the server can't compare.
    pub(super) pending: Option<&'a Record>,
    pub(super) ttl_ms: u64,
}

impl PendingCompletion<'_> {
    /// Returns the number of bytes of its record.
    pub(super) fn value_len(&self) -> usize {
        format::len(self.record)
    }

    fn write(&self, bytes: &mut Vec<u8>) -> Lengths {
        let pending = self.pending.map_or(0, format::len);
        bytes.reserve(self.name.len() + self.value_len() + pending);
        self.name.write(bytes);
        let value_at = bytes.len();
        format::write(self.record, bytes);
        let pending_at = bytes.len();
        if let Some(at) = self.reserved_at {
            // A script keeps the times that are in the record.
            format::set_times(&mut bytes[value_at..], at);
        }
        if let Some(pending) = self.pending {
            format::write(pending, bytes);
        }
        Lengths { key: self.name.len(), value: pending_at - value_at, pending: bytes.len() - pending_at }
    }
}

/// The lengths of the parts that were written end to end: key, value and the record to compare with.
#[derive(Clone, Copy)]
struct Lengths {
    key: usize,
    value: usize,
    pending: usize,
}

/// A completion as it is sent. Its value names the attempt.
#[derive(Clone, Copy, Debug)]
struct Completion<'a> {
    key: &'a [u8],
    value: &'a [u8],
    /// The record as the reservation wrote it, which names the attempt, too; empty if it must have changed, or if the
    /// server can't compare.
    pending: &'a [u8],
    ttl_ms: u64,
}

impl<'a> Completion<'a> {
    /// Splits the parts at the start of `bytes`.
    fn of(bytes: &'a [u8], Lengths { key, value, pending }: Lengths, ttl_ms: u64) -> Self {
        let (key, rest) = bytes.split_at(key);
        let (value, rest) = rest.split_at(value);
        Self { key, value, pending: &rest[..pending], ttl_ms }
    }
}

/// A reservation or completion in [`OpBatch::bytes`]: key, value and the record to compare with, end to end.
struct BatchEntry {
    slot: usize,
    at: usize,
    lengths: Lengths,
    ttl_ms: u64,
}

/// The operations that gather for one batch. Their bytes share one buffer, so that an operation allocates nothing
/// before its batch is sent.
struct OpBatch {
    bytes: Vec<u8>,
    reserves: Vec<BatchEntry>,
    completions: Vec<BatchEntry>,
    commands: Vec<(usize, RedisCommand)>,
    /// Time at which the first operation joined.
    opened: Instant,
    replies: Arc<Replies>,
}

impl OpBatch {
    fn new(opened: Instant) -> Self {
        let (bytes, replies) = (Vec::new(), Arc::default());
        let (reserves, completions, commands) = (Vec::new(), Vec::new(), Vec::new());
        Self { bytes, reserves, completions, commands, opened, replies }
    }

    fn len(&self) -> usize {
        self.reserves.len() + self.completions.len() + self.commands.len()
    }

    fn is_full(&self) -> bool {
        self.len() >= BATCH || self.bytes.len() >= BATCH_BYTES
    }

    /// Encodes an operation directly into the batch.
    fn entry(&mut self, ttl_ms: u64, write: impl FnOnce(&mut Vec<u8>) -> Lengths) -> BatchEntry {
        let at = self.bytes.len();
        BatchEntry { slot: self.replies.open(), at, lengths: write(&mut self.bytes), ttl_ms }
    }

    /// Adds a reservation. Returns the slot of its answer.
    fn add_reserve(&mut self, reserving: &PendingReservation<'_>) -> usize {
        let entry = self.entry(reserving.ttl_ms, |bytes| reserving.write(bytes));
        let slot = entry.slot;
        self.reserves.push(entry);
        slot
    }

    fn add_completion(&mut self, finishing: &PendingCompletion<'_>) -> usize {
        let entry = self.entry(finishing.ttl_ms, |bytes| finishing.write(bytes));
        let slot = entry.slot;
        self.completions.push(entry);
        slot
    }

    fn add_command(&mut self, ask: RedisCommand) -> usize {
        let slot = self.replies.open();
        self.commands.push((slot, ask));
        slot
    }

    /// Removes the operations that might return more than `records` records in total.
    fn beyond(&mut self, mut records: usize) -> Overflow {
        let reserves = self.reserves.split_off(records.min(self.reserves.len()));
        records -= self.reserves.len();
        let is_beyond = |(_, ask): &mut (usize, RedisCommand)| {
            let beyond = ask.brings_record && records == 0;
            records -= usize::from(ask.brings_record && !beyond);
            beyond
        };
        Overflow { reserves, commands: self.commands.extract_if(.., is_beyond).collect() }
    }

    /// Replaces the operations by the next ones of `later`, which return up to `records` records.
    fn next(&mut self, later: &mut Overflow, records: usize) {
        let now = records.min(later.reserves.len());
        let commands = (records - now).min(later.commands.len());
        self.completions.clear();
        self.reserves.clear();
        self.reserves.extend(later.reserves.drain(..now));
        self.commands.clear();
        self.commands.extend(later.commands.drain(..commands));
        self.forget_gone();
    }

    /// Forgets the operations whose callers are gone, unless they are kept.
    fn forget_gone(&mut self) {
        let slots = lock(&self.replies.0);
        let is_gone = |slot: usize| matches!(slots[slot], ReplySlot::Gone);
        self.reserves.retain(|entry| !is_gone(entry.slot));
        self.commands.retain(|(slot, ask)| ask.is_kept || !is_gone(*slot));
    }

    fn key(&self, entry: &BatchEntry) -> &[u8] {
        &self.bytes[entry.at..entry.at + entry.lengths.key]
    }

    fn reserve(&self, entry: &BatchEntry) -> Cmd {
        let Completion { key, value, ttl_ms, .. } = self.completion(entry);
        reserve(key, value, ttl_ms)
    }

    fn completion(&self, entry: &BatchEntry) -> Completion<'_> {
        Completion::of(&self.bytes[entry.at..], entry.lengths, entry.ttl_ms)
    }

    /// Empties the batch for other operations, and keeps its capacity.
    fn clear(&mut self) {
        self.bytes.clear();
        self.reserves.clear();
        self.completions.clear();
        self.commands.clear();
        self.replies = Arc::default();
    }
}

/// The operations of a batch that return records and are left for further exchanges.
struct Overflow {
    reserves: Vec<BatchEntry>,
    commands: Vec<(usize, RedisCommand)>,
}

impl Overflow {
    fn is_empty(&self) -> bool {
        self.reserves.is_empty() && self.commands.is_empty()
    }

    fn slots(&self) -> impl Iterator<Item = usize> {
        self.reserves.iter().map(|entry| entry.slot).chain(self.commands.iter().map(|(slot, _)| *slot))
    }
}

/// The answers of one batch, shared by its lane and its callers.
#[derive(Default)]
struct Replies(Mutex<Vec<ReplySlot>>);

#[derive(Default)]
enum ReplySlot {
    #[default]
    Empty,
    Waiting(Waker),
    Done(OpAnswer),
    /// The caller is gone.
    Gone,
}

impl Replies {
    fn open(&self) -> usize {
        let mut slots = lock(&self.0);
        slots.push(ReplySlot::Empty);
        slots.len() - 1
    }

    /// Sets answers and wakes their callers, after the lock is released.
    fn deliver(&self, answers: impl Iterator<Item = (usize, OpAnswer)>) {
        let mut wakers = Vec::with_capacity(answers.size_hint().0);
        let mut slots = lock(&self.0);
        for (slot, answer) in answers {
            let slot = &mut slots[slot];
            if matches!(slot, ReplySlot::Gone) {
                continue;
            }
            if let ReplySlot::Waiting(waker) = std::mem::replace(slot, ReplySlot::Done(answer)) {
                wakers.push(waker);
            }
        }
        drop(slots);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Removes the entries whose callers are gone.
    fn retain_waiting(&self, entries: &mut Vec<&BatchEntry>) {
        let slots = lock(&self.0);
        entries.retain(|entry| !matches!(slots[entry.slot], ReplySlot::Gone));
    }

    /// Answers every operation that isn't answered yet with `failure`.
    fn fail(&self, failure: &ExchangeFailure) {
        let open: Vec<usize> = {
            let slots = lock(&self.0);
            (0..slots.len()).filter(|&i| !matches!(slots[i], ReplySlot::Done(_) | ReplySlot::Gone)).collect()
        };
        self.deliver(open.into_iter().map(|slot| (slot, Err(failure.clone()))));
    }
}

/// Waits for one answer of a batch.
pub(super) struct ReplyWaiter {
    replies: Arc<Replies>,
    slot: usize,
    /// True once the answer was taken.
    taken: bool,
}

impl Future for ReplyWaiter {
    type Output = OpAnswer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpAnswer> {
        let this = &mut *self;
        let slot = &mut lock(&this.replies.0)[this.slot];
        match std::mem::replace(slot, ReplySlot::Gone) {
            ReplySlot::Done(answer) => {
                this.taken = true;
                Poll::Ready(answer)
            }
            ReplySlot::Waiting(waker) if waker.will_wake(cx.waker()) => {
                *slot = ReplySlot::Waiting(waker);
                Poll::Pending
            }
            _ => {
                *slot = ReplySlot::Waiting(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for ReplyWaiter {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        // Drops the answer, which may be large, outside the lock.
        let before = std::mem::replace(&mut lock(&self.replies.0)[self.slot], ReplySlot::Gone);
        drop(before);
    }
}

/// One connection and everything in flight on it.
pub(super) struct Dispatch(Arc<DispatchInner>);

struct DispatchInner {
    connection: ServerConnection,
    terms: BatchTerms,
    replicas: Option<Replicas>,
    runtime: Handle,
    /// True while a lone command is in flight, driven by its caller.
    lone: AtomicBool,
    /// Number of running lanes. Written under `queue`, read without it as a hint.
    lanes: AtomicUsize,
    replays: Replays,
    /// Number of the connection whose server does not support `SET … IFEQ`; 0 if there is none.
    plain_sets: AtomicU64,
    /// Size of the largest recent record, in bytes.
    record: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    gathers: VecDeque<OpBatch>,
    spare: Vec<OpBatch>,
}

struct LoneOp<'a>(&'a AtomicBool);

impl Drop for LoneOp<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Dispatch {
    /// Sends over `connection` from tasks of the current runtime. A gathered operation waits at most as long as an
    /// exchange may take. With `replicas`, an answer counts once they have the written state.
    pub(super) fn new(connection: ServerConnection, terms: BatchTerms, replicas: Option<Replicas>) -> Self {
        Self(Arc::new(DispatchInner {
            connection,
            plain_sets: AtomicU64::new(u64::from(!terms.compares)),
            terms,
            replicas,
            runtime: Handle::current(),
            lone: AtomicBool::new(false),
            lanes: AtomicUsize::new(0),
            replays: Replays::new(),
            record: AtomicUsize::new(FIRST_RECORD),
            queue: Mutex::default(),
        }))
    }

    /// Sends `SET key value NX GET PX ttl`. The answer is nil if the key is now reserved, otherwise the existing value.
    pub(super) fn reserve<'a>(&'a self, reserving: &PendingReservation<'a>) -> OpFuture<'a> {
        let Some(lone) = self.0.enter() else {
            return OpFuture::Gathered(self.0.gather(|gather| gather.add_reserve(reserving)));
        };
        let command = written(reserving);
        OpFuture::alone(async move {
            let _lone = lone;
            let answer = self.0.one(&command).await;
            self.0.expect_records(record_bytes(&answer));
            answer
        })
    }

    /// Finishes a record. The answer shows whether the record belongs to this attempt and is now finished.
    pub(super) fn finish<'a>(&'a self, finishing: &PendingCompletion<'a>) -> OpFuture<'a> {
        let finishing = PendingCompletion { pending: finishing.pending.filter(|_| self.0.compares()), ..*finishing };
        let Some(lone) = self.0.enter() else {
            return OpFuture::Gathered(self.0.gather(|gather| gather.add_completion(&finishing)));
        };
        OpFuture::alone(async move {
            let _lone = lone;
            let unanswered = DelegatedOp(Some(|| drop(self.0.gather(|gather| gather.add_completion(&finishing)))));
            let mut bytes = Vec::new();
            let lengths = finishing.write(&mut bytes);
            let answer = self.0.finish_alone(Completion::of(&bytes, lengths, finishing.ttl_ms)).await;
            unanswered.done();
            answer
        })
    }

    /// Sends any other command.
    pub(super) fn command(&self, ask: RedisCommand) -> OpFuture<'_> {
        let Some(lone) = self.0.enter() else {
            return OpFuture::Gathered(self.0.gather(|gather| gather.add_command(ask)));
        };
        if !ask.is_kept {
            return OpFuture::alone(async move {
                let _lone = lone;
                let answer = self.0.ask(&ask).await;
                if ask.brings_record {
                    self.0.expect_records(record_bytes(&answer));
                }
                answer
            });
        }
        OpFuture::alone(async move {
            let _lone = lone;
            let unanswered = DelegatedOp(Some(|| drop(self.0.gather(|gather| gather.add_command(ask.clone())))));
            let answer = self.0.ask(&ask).await;
            unanswered.done();
            answer
        })
    }
}

/// An operation in progress: one future for all ways it may take.
pub(super) enum OpFuture<'a> {
    /// In a batch.
    Gathered(ReplyWaiter),
    /// Driven by its caller. Boxed: under load most operations gather, and would carry the size of this future.
    Alone(Pin<Box<dyn Future<Output = OpAnswer> + Send + 'a>>),
}

impl<'a> OpFuture<'a> {
    pub(super) fn alone(driven: impl Future<Output = OpAnswer> + Send + 'a) -> Self {
        Self::Alone(Box::pin(driven))
    }
}

impl Future for OpFuture<'_> {
    type Output = OpAnswer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OpAnswer> {
        match &mut *self {
            Self::Gathered(reply) => Pin::new(reply).poll(cx),
            Self::Alone(driven) => driven.as_mut().poll(cx),
        }
    }
}

/// An operation that was handed over and is driven by its caller. If the caller goes away before the answer, a lane
/// takes the operation: it may not have been sent yet, and sending it twice does no harm.
struct DelegatedOp<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> DelegatedOp<F> {
    /// Notes that the answer has arrived.
    fn done(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for DelegatedOp<F> {
    fn drop(&mut self) {
        if let Some(hand_over) = self.0.take() {
            hand_over();
        }
    }
}

impl Dispatch {
    /// Returns the connection, for requests that are not operations.
    pub(super) fn connection(&self) -> &ServerConnection {
        &self.0.connection
    }

    /// Like [`reserve`](Self::reserve), for a key whose slot is migrating to this node.
    pub(super) fn reserve_asking<'a>(&'a self, reserving: &PendingReservation<'a>) -> OpFuture<'a> {
        OpFuture::alone(self.asking(written(reserving)))
    }

    /// Like [`finish`](Self::finish), for a key whose slot is migrating to this node.
    pub(super) fn finish_asking<'a>(&'a self, finishing: &PendingCompletion<'a>) -> OpFuture<'a> {
        let mut bytes = Vec::new();
        let lengths = finishing.write(&mut bytes);
        let completion = Completion::of(&bytes, lengths, finishing.ttl_ms);
        OpFuture::alone(self.asking(self.0.finish_one(completion, true)))
    }

    /// Like [`command`](Self::command), for a key whose slot is migrating to this node.
    pub(super) fn command_asking(&self, ask: RedisCommand) -> OpFuture<'_> {
        let command = match ask.script {
            Some(source) => with_source(&ask.command, source),
            None => ask.command,
        };
        OpFuture::alone(self.asking(command))
    }

    /// Sends a command alone, after `ASKING`, which permits one command.
    async fn asking(&self, command: Cmd) -> OpAnswer {
        let mut pipeline = Pipeline::with_capacity(5);
        pipeline.cmd("ASKING").add_command(command);
        self.0.exchange(&mut pipeline).await?.pop().unwrap_or(Err(ExchangeFailure::Lost))
    }
}

impl DispatchInner {
    /// Sends one command.
    async fn one(&self, command: &Cmd) -> OpAnswer {
        if self.replicas.is_none() {
            return self.connection.one(command).await;
        }
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.add_command(command.clone());
        self.exchange(&mut pipeline).await?.pop().unwrap_or(Err(ExchangeFailure::Lost))
    }

    /// Sends one command; with the source of its script if the server has forgotten it.
    async fn ask(&self, ask: &RedisCommand) -> OpAnswer {
        match (self.one(&ask.command).await, ask.script) {
            // The server restarted, failed over or flushed its scripts: nothing was written.
            (Err(failure), Some(source)) if failure.is_unknown_script() => {
                self.one(&with_source(&ask.command, source)).await
            }
            (answer, _) => answer,
        }
    }

    /// Returns whether the server counts as knowing `SET … IFEQ`: by its version when the store was opened, until an
    /// answer shows otherwise. A new connection may lead to another server, so the option is tried again.
    fn compares(&self) -> bool {
        self.connection.generation() != self.plain_sets.load(Ordering::Relaxed)
    }

    /// Returns the answer to a completion by `SET … IFEQ`; `None` if nothing was written and a script has to decide.
    fn compared(&self, answer: OpAnswer) -> Option<OpAnswer> {
        match answer {
            Ok(Value::Okay) => Some(Ok(Value::Int(1))),
            // The record belongs to another attempt, is gone or finished already, or a duplicate waits for it.
            Ok(Value::Nil) => None,
            Err(ExchangeFailure::Unreplicated(set, why)) => match *set {
                Value::Okay => Some(Err(ExchangeFailure::Unreplicated(Box::new(Value::Int(1)), why))),
                Value::Nil => None,
                other => Some(Err(ExchangeFailure::Unreplicated(Box::new(other), why))),
            },
            Err(failure) if failure.is_unknown_option() => {
                self.plain_sets.store(self.connection.generation(), Ordering::Relaxed);
                None
            }
            other => Some(other),
        }
    }

    async fn finish_alone(&self, completion: Completion<'_>) -> OpAnswer {
        if !completion.pending.is_empty() && self.compares() {
            let answer = self.one(&compare(completion)).await;
            if let Some(answer) = self.compared(answer) {
                return answer;
            }
        }
        match self.one(&self.finish_one(completion, false)).await {
            Err(failure) if failure.is_unknown_script() => self.one(&self.finish_one(completion, true)).await,
            answer => answer,
        }
    }

    /// Sends many commands. Returns as many answers.
    async fn exchange(&self, pipeline: &mut Pipeline) -> Result<Vec<OpAnswer>, ExchangeFailure> {
        let Some(Replicas { count, within }) = self.replicas else {
            let values = self.connection.many(pipeline).await?;
            return Ok(values.into_iter().map(|value| answer(value, &Ok(()))).collect());
        };
        // `WAIT` covers the writes of its own connection. A replay, or an operation that finds its write already done,
        // writes nothing: its answer would count as confirmed although no replica may have the record. Replicas follow
        // one stream, so one write after all answers covers them all.
        let (asking, key) = match &pipeline.cmd_iter().collect::<Vec<_>>()[..] {
            [first, second, ..] if argument(first, 0) == b"ASKING" => (true, key_of(second).to_vec()),
            [first, ..] => (false, key_of(first).to_vec()),
            [] => return Ok(Vec::new()),
        };
        if asking {
            pipeline.cmd("ASKING");
        }
        let confirm = |pipeline: &mut Pipeline, key: &[u8]| {
            pipeline.cmd("EVAL").arg(TOUCH).arg(1).arg(key);
            pipeline.cmd("WAIT").arg(count).arg(millis(within).max(1));
        };
        confirm(pipeline, &key);
        let generation = self.connection.generation();
        let mut values = self.connection.many(pipeline).await?;
        let (mut confirmed, mut touched) = (values.pop(), values.pop());
        if asking {
            values.pop();
        } else if matches!(&touched, Some(Value::ServerError(error)) if is_redirect(error)) {
            // The slot of the first key is being moved. Any key that was served can confirm instead, on the same
            // connection: another connection may lead to a server without these writes.
            let mut served = pipeline.cmd_iter().zip(&values).filter(|(_, it)| !matches!(it, Value::ServerError(_)));
            if let Some((command, _)) = served.next() {
                let mut again = Pipeline::with_capacity(2);
                confirm(&mut again, key_of(command));
                let mut answers = self.connection.many(&again).await?;
                if self.connection.generation() == generation {
                    (confirmed, touched) = (answers.pop(), answers.pop());
                }
            }
        }
        let replicated = match (confirmed, touched) {
            (Some(Value::Int(have)), Some(Value::Int(1))) if usize::try_from(have).is_ok_and(|have| have >= count) => {
                Ok(())
            }
            (Some(Value::ServerError(error)), _) | (_, Some(Value::ServerError(error))) => {
                Err(Some(error_text(&error)))
            }
            _ => Err(None),
        };
        Ok(values.into_iter().map(|value| answer(value, &replicated)).collect())
    }

    /// Returns the right to send a command alone, if nothing else is in flight.
    fn enter(&self) -> Option<LoneOp<'_>> {
        let alone = self.lanes.load(Ordering::Relaxed) == 0 && !self.lone.swap(true, Ordering::Relaxed);
        alone.then(|| LoneOp(&self.lone))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// Returns the batch that a lane sends next. `None` also ends the lane's entry in `lanes`. Both happen under one
    /// lock, or an operation that gathers in between would be stranded.
    fn next(&self) -> Option<OpBatch> {
        let mut queue = self.queue();
        let next = queue.gathers.pop_front();
        if next.is_none() {
            self.lanes.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    /// Keeps the buffers of a sent batch for another, unless they grew unusually large.
    fn keep(&self, mut gather: OpBatch) {
        gather.clear();
        let mut queue = self.queue();
        if queue.spare.len() < LANES && gather.bytes.capacity() <= 2 * BATCH_BYTES {
            queue.spare.push(gather);
        }
    }

    /// Adds an operation to the gathering batch, and makes sure that a lane will take it.
    fn gather(self: &Arc<Self>, add: impl FnOnce(&mut OpBatch) -> usize) -> ReplyWaiter {
        let mut queue = self.queue();
        if queue.gathers.back().is_none_or(OpBatch::is_full) {
            let opened = self.terms.clock.now();
            let gather = queue.spare.pop().map(|spare| OpBatch { opened, ..spare });
            queue.gathers.push_back(gather.unwrap_or_else(|| OpBatch::new(opened)));
        }
        let gather = queue.gathers.back_mut().expect("just pushed");
        let slot = add(gather);
        let reply = ReplyWaiter { replies: Arc::clone(&gather.replies), slot, taken: false };
        let lanes = self.lanes.load(Ordering::Relaxed);
        let limit = match self.replicas {
            // `WAIT` blocks every later command on its connection.
            Some(_) => 1,
            None if self.replays.are_expected() => LANES_FOR_REPLAYS,
            None => LANES,
        };
        if lanes < limit {
            self.lanes.store(lanes + 1, Ordering::Relaxed);
            drop(queue);
            self.runtime.spawn(Lane { shared: Arc::clone(self), running: true }.run());
        }
        reply
    }

    /// Notes the largest record among some answers, in bytes. The expected size falls by at most half, so that small
    /// records are expected again only after a while.
    fn expect_records(&self, largest: usize) {
        let before = self.record.load(Ordering::Relaxed);
        let now = largest.max(before / 2);
        if now != before {
            self.record.store(now, Ordering::Relaxed);
        }
    }

    /// Returns the number of records that one exchange may return.
    fn records_at_once(&self) -> usize {
        (ANSWER_BYTES / self.record.load(Ordering::Relaxed).max(1)).max(1)
    }

    async fn send(&self, gather: &mut OpBatch) {
        let replies = Arc::clone(&gather.replies);
        gather.forget_gone();
        // Large completions are sent alone, after the others: a server that refuses their size closes the connection,
        // and a batch would lose its answers.
        let large: Vec<BatchEntry> = gather.completions.extract_if(.., |entry| entry.lengths.value >= SURE).collect();
        let mut later = gather.beyond(self.records_at_once());
        loop {
            if let Err(failure) = self.send_small(gather, &replies).await {
                let unsent = later.slots().chain(large.iter().map(|entry| entry.slot));
                replies.deliver(unsent.map(|slot| (slot, Err(ExchangeFailure::NotSent(STALLED.into())))));
                return replies.fail(&failure);
            }
            if later.is_empty() {
                break;
            }
            gather.next(&mut later, self.records_at_once());
        }
        for entry in large {
            let answer = self.finish_alone(gather.completion(&entry)).await;
            replies.deliver(std::iter::once((entry.slot, answer)));
        }
    }

    /// Sends the operations in `gather` and answers them. After an error the rest is still unanswered.
    async fn send_small(&self, gather: &mut OpBatch, replies: &Replies) -> Result<(), ExchangeFailure> {
        // Completions: by `SET … IFEQ` where the bytes are at hand, the others by scripts.
        let by_comparing = |entry: &mut BatchEntry| entry.lengths.pending > 0;
        let compared: Vec<BatchEntry> = match self.compares() {
            true => gather.completions.extract_if(.., by_comparing).collect(),
            false => Vec::new(),
        };
        let calls: Vec<Range<usize>> = chunks(gather.completions.len(), self.finished_at_once()).collect();
        let look_first = gather.reserves.len() >= LOOK_FIRST && self.replays.are_expected() && !self.terms.one_key;

        // One pipeline of all operations. Its order is the order of the answers below: reservations, commands, script
        // calls, comparisons.
        let others = gather.commands.len() + calls.len() + compared.len();
        let mut pipeline = Pipeline::with_capacity(gather.reserves.len() + others);
        if look_first {
            let mut look = Cmd::with_capacity(gather.reserves.len() + 1, gather.bytes.len());
            look.arg("MGET");
            gather.reserves.iter().for_each(|entry| {
                look.arg(gather.key(entry));
            });
            pipeline.add_command(look);
        } else {
            for entry in &gather.reserves {
                pipeline.add_command(gather.reserve(entry));
            }
        }
        let mut asked = Vec::with_capacity(gather.commands.len());
        for (slot, RedisCommand { command, script, brings_record, .. }) in gather.commands.drain(..) {
            asked.push((slot, pipeline.len(), script, brings_record));
            pipeline.add_command(command);
        }
        for call in &calls {
            pipeline.add_command(self.finish(gather, &gather.completions[call.clone()], false));
        }
        for entry in &compared {
            pipeline.add_command(compare(gather.completion(entry)));
        }
        if pipeline.is_empty() {
            return Ok(());
        }
        let mut answers = self.exchange(&mut pipeline).await?.into_iter();
        // A missing answer must not become nil: nil means "reserved".
        let mut next = || answers.next().unwrap_or(Err(ExchangeFailure::Lost));

        // Reservations. After a look-up the absent keys are reserved in a second exchange.
        let (mut absent, mut again) = (Vec::new(), Pipeline::new());
        let mut largest = None;
        if look_first {
            absent = self.found(gather, next(), &mut largest);
            for entry in &absent {
                again.add_command(gather.reserve(entry));
            }
        } else if !gather.reserves.is_empty() {
            let mut met = 0;
            replies.deliver(gather.reserves.iter().map(|entry| {
                let answer = next();
                met += usize::from(matches!(answer, Ok(Value::BulkString(_))));
                largest = largest.max(Some(record_bytes(&answer)));
                (entry.slot, answer)
            }));
            self.replays.note(met, gather.reserves.len());
        }
        // Commands and script calls. If the server lost its scripts (restart, failover, SCRIPT FLUSH), these calls
        // wrote nothing and are repeated with their source.
        let (mut unknown, mut unfinished) = (Vec::new(), Vec::new());
        replies.deliver(asked.into_iter().filter_map(|(slot, at, script, brings_record)| {
            let answer = next();
            match (&answer, script) {
                (Err(failure), Some(source)) if failure.is_unknown_script() => {
                    again.add_command(with_source(pipeline.cmd_iter().nth(at)?, source));
                    unknown.push(slot);
                    return None;
                }
                _ if brings_record => largest = largest.max(Some(record_bytes(&answer))),
                _ => {}
            }
            Some((slot, answer))
        }));
        for call in calls {
            match next() {
                Err(failure) if failure.is_unknown_script() => unfinished.push(call),
                answer => settle(replies, &gather.completions[call], answer),
            }
        }
        for call in &unfinished {
            again.add_command(self.finish(gather, &gather.completions[call.clone()], true));
        }
        // Comparisons. Where the bytes differ, a script decides.
        let differing = self.settle_compared(replies, compared, next);
        if let Some(largest) = largest {
            self.expect_records(largest);
        }

        // The second exchange: absent keys, and calls of scripts that the server had forgotten.
        if !again.is_empty() {
            let mut answers = self.exchange(&mut again).await?.into_iter();
            let mut next = || answers.next().unwrap_or(Err(ExchangeFailure::Lost));
            replies.deliver(absent.into_iter().map(|entry| (entry.slot, next())));
            replies.deliver(unknown.into_iter().map(|slot| (slot, next())));
            for call in unfinished {
                settle(replies, &gather.completions[call], next());
            }
        }
        self.finish_by_scripts(gather, &differing, replies).await
    }

    /// Answers the completions that the server has compared. Returns the completions for which a script has to decide.
    fn settle_compared(
        &self,
        replies: &Replies,
        compared: Vec<BatchEntry>,
        mut next: impl FnMut() -> OpAnswer,
    ) -> Vec<BatchEntry> {
        let mut differing = Vec::new();
        replies.deliver(compared.into_iter().filter_map(|entry| match self.compared(next()) {
            Some(answer) => Some((entry.slot, answer)),
            None => {
                differing.push(entry);
                None
            }
        }));
        differing
    }

    /// Finishes `entries` by scripts, in a further exchange; in one more if the server has forgotten the scripts.
    async fn finish_by_scripts(
        &self,
        gather: &OpBatch,
        entries: &[BatchEntry],
        replies: &Replies,
    ) -> Result<(), ExchangeFailure> {
        let mut calls: Vec<Range<usize>> = chunks(entries.len(), self.finished_at_once()).collect();
        for with_source in [false, true] {
            if calls.is_empty() {
                break;
            }
            let mut pipeline = Pipeline::with_capacity(calls.len());
            for call in &calls {
                pipeline.add_command(self.finish(gather, &entries[call.clone()], with_source));
            }
            let mut answers = self.exchange(&mut pipeline).await?.into_iter();
            calls.retain(|call| match answers.next().unwrap_or(Err(ExchangeFailure::Lost)) {
                Err(failure) if failure.is_unknown_script() && !with_source => true,
                answer => {
                    settle(replies, &entries[call.clone()], answer);
                    false
                }
            });
        }
        Ok(())
    }

    /// Returns the number of keys that a script call finishes.
    fn finished_at_once(&self) -> usize {
        if self.terms.one_key { 1 } else { FINISHED_AT_ONCE }
    }

    /// Delivers the existing values. Returns the reservations without a value whose callers still wait.
    fn found<'a>(&self, gather: &'a OpBatch, found: OpAnswer, largest: &mut Option<usize>) -> Vec<&'a BatchEntry> {
        let (found, replicated) = match found {
            Ok(found) => (found, Ok(())),
            Err(ExchangeFailure::Unreplicated(found, why)) => (*found, Err(why)),
            // The look-up has written nothing, so the callers get its failure.
            Err(failure) => {
                gather.replies.deliver(gather.reserves.iter().map(|entry| (entry.slot, Err(failure.clone()))));
                return Vec::new();
            }
        };
        let values = match found {
            Value::Array(values) if values.len() == gather.reserves.len() => values,
            _ => {
                gather.replies.deliver(gather.reserves.iter().map(|entry| (entry.slot, Err(ExchangeFailure::Lost))));
                return Vec::new();
            }
        };
        let mut absent = Vec::new();
        gather.replies.deliver(gather.reserves.iter().zip(values).filter_map(|(entry, value)| match value {
            Value::Nil => {
                absent.push(entry);
                None
            }
            value => {
                let answer = answer(value, &replicated);
                *largest = (*largest).max(Some(record_bytes(&answer)));
                Some((entry.slot, answer))
            }
        }));
        self.replays.note(gather.reserves.len() - absent.len(), gather.reserves.len());
        gather.replies.retain_waiting(&mut absent);
        absent
    }

    fn finish(&self, gather: &OpBatch, entries: &[BatchEntry], with_source: bool) -> Cmd {
        if self.terms.one_key {
            return self.finish_one(gather.completion(&entries[0]), with_source);
        }
        let completions = entries.iter().map(|entry| gather.completion(entry));
        self.finishing(&self.terms.scripts.finish, with_source, completions)
    }

    fn finish_one(&self, completion: Completion<'_>, with_source: bool) -> Cmd {
        self.finishing(&self.terms.scripts.finish_one, with_source, std::iter::once(completion))
    }

    fn finishing<'a>(
        &self,
        Script { source, sha }: &Script,
        with_source: bool,
        completions: impl ExactSizeIterator<Item = Completion<'a>> + Clone,
    ) -> Cmd {
        let (name, script) = if with_source { ("EVAL", *source) } else { ("EVALSHA", sha.as_str()) };
        finish(name, script, &self.terms.channel, completions)
    }
}

/// A task that sends batches until no more operations gather.
struct Lane {
    shared: Arc<DispatchInner>,
    running: bool,
}

impl Lane {
    async fn run(mut self) {
        loop {
            let shared = &self.shared;
            let Some(mut gather) = shared.next() else {
                self.running = false;
                return;
            };
            let operations = gather.len();
            let mut unanswered = LaneGuard(Some(Arc::clone(&gather.replies)));
            if shared.terms.clock.now().saturating_since(gather.opened) > shared.connection.patience() {
                // The server stalls. Operations that waited this long are not sent, and their callers know that nothing
                // was written. So no operation takes longer than two time-outs, unless the server keeps answering
                // others.
                gather.replies.fail(&ExchangeFailure::NotSent(STALLED.into()));
            } else {
                shared.send(&mut gather).await;
            }
            unanswered.0 = None;
            shared.keep(gather);
            // The callers that were just woken run first, so that their next operations join the next batch.
            if operations > 1 {
                tokio::task::yield_now().await;
            }
        }
    }
}

impl Drop for Lane {
    /// Only a lane that panicked or whose runtime is gone is still running here. The lane ends its entry in `lanes` and
    /// fails the waiting batches, because no other lane may come.
    fn drop(&mut self) {
        if self.running {
            let mut queue = self.shared.queue();
            self.shared.lanes.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut queue.gathers);
            drop(queue);
            for gather in waiting {
                gather.replies.fail(&ExchangeFailure::NotSent("the runtime of the connection has shut down".into()));
            }
        }
    }
}

/// Fails the operations that a lane leaves unanswered if its task is dropped or panics.
struct LaneGuard(Option<Arc<Replies>>);

impl Drop for LaneGuard {
    fn drop(&mut self) {
        if let Some(replies) = &self.0 {
            replies.fail(&ExchangeFailure::Lost);
        }
    }
}

fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(size).map(move |from| from..len.min(from + size))
}

/// Answers the keys of one script call.
fn settle(replies: &Replies, entries: &[BatchEntry], settled: OpAnswer) {
    let (value, replicated) = match settled {
        Ok(value) => (value, Ok(())),
        Err(ExchangeFailure::Unreplicated(value, why)) => (*value, Err(why)),
        Err(failure) => return replies.deliver(entries.iter().map(|entry| (entry.slot, Err(failure.clone())))),
    };
    let (answers, error): (Vec<u8>, Arc<str>) = match value {
        Value::BulkString(answers) => (answers, "".into()),
        Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
            Ok([Value::BulkString(answers), Value::BulkString(error)]) => {
                (answers, String::from_utf8_lossy(&error).into())
            }
            _ => (Vec::new(), "".into()),
        },
        // The script for one key answers with a number.
        Value::Int(done) if entries.len() == 1 => {
            return replies.deliver(std::iter::once((entries[0].slot, answer(Value::Int(done), &replicated))));
        }
        _ => (Vec::new(), "".into()),
    };
    replies.deliver(entries.iter().enumerate().map(|(i, entry)| {
        let answer = match answers.get(i) {
            Some(b'1') => answer(Value::Int(1), &replicated),
            Some(b'0') => answer(Value::Int(0), &replicated),
            Some(b'E') => Err(ExchangeFailure::Refused(ErrorReply::read(&error))),
            _ => Err(ExchangeFailure::Lost),
        };
        (entry.slot, answer)
    }));
}

/// Returns whether a node of a cluster does not serve a key, or does not serve it yet.
fn is_redirect(error: &ServerError) -> bool {
    matches!(error.code(), "MOVED" | "ASK" | "TRYAGAIN")
}

/// Returns the text of an error of the server.
fn error_text(error: &ServerError) -> Arc<str> {
    format!("{} {}", error.code(), error.details().unwrap_or_default()).into()
}

/// Returns the size of the record in an answer, in bytes; 0 if it holds none.
fn record_bytes(answer: &OpAnswer) -> usize {
    let value = match answer {
        Ok(value) => value,
        Err(ExchangeFailure::Unreplicated(value, _)) => value,
        Err(_) => return 0,
    };
    match value {
        Value::BulkString(record) => record.len(),
        // A record with its retention, or with the rest of its lease.
        Value::Array(parts) => match parts.first() {
            Some(Value::BulkString(record)) => record.len(),
            _ => 0,
        },
        _ => 0,
    }
}

/// Returns the first key that a command names.
fn key_of(command: &Cmd) -> &[u8] {
    match argument(command, 0) {
        b"EVAL" | b"EVALSHA" => argument(command, 3),
        _ => argument(command, 1),
    }
}

fn argument(command: &Cmd, at: usize) -> &[u8] {
    match command.args_iter().nth(at) {
        Some(redis::Arg::Simple(argument)) => argument,
        _ => b"",
    }
}

fn written(reserving: &PendingReservation<'_>) -> Cmd {
    let mut bytes = Vec::new();
    let Lengths { key, .. } = reserving.write(&mut bytes);
    let (key, value) = bytes.split_at(key);
    reserve(key, value, reserving.ttl_ms)
}

fn reserve(key: &[u8], value: &[u8], ttl_ms: u64) -> Cmd {
    let mut command = Cmd::with_capacity(7, key.len() + value.len() + 32);
    command.arg("SET").arg(key).arg(value).arg("NX").arg("GET").arg("PX").arg(ttl_ms);
    command
}

/// Makes the command that completes if the record is unchanged since its reservation.
fn compare(Completion { key, value, pending, ttl_ms }: Completion<'_>) -> Cmd {
    let mut command = Cmd::with_capacity(7, key.len() + value.len() + pending.len() + 32);
    command.arg("SET").arg(key).arg(value).arg("IFEQ").arg(pending).arg("PX").arg(ttl_ms);
    command
}

fn finish<'a>(
    name: &str,
    script: &str,
    channel: &str,
    completions: impl ExactSizeIterator<Item = Completion<'a>> + Clone,
) -> Cmd {
    let bytes: usize = completions.clone().map(|it| it.key.len() + it.value.len() + 20).sum();
    let mut command = Cmd::with_capacity(4 + 3 * completions.len(), bytes + script.len() + channel.len() + 16);
    command.arg(name).arg(script).arg(completions.len());
    for it in completions.clone() {
        command.arg(it.key);
    }
    command.arg(channel);
    for it in completions {
        command.arg(it.value).arg(it.ttl_ms);
    }
    command
}
