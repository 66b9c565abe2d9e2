//! Sends the operations of many tasks over one connection.
//!
//! - A lone command never waits: while nothing is in flight, it goes straight to the connection, driven by its caller.
//! - Otherwise operations gather, and a few *lanes* (spawned tasks) each send everything that has gathered as one pipeline:
//!   one write, one answer to read, one wake-up. A lane takes what is there; it never waits for more.
//! - Gathered completions become one script call for up to [`FINISHED_AT_ONCE`] keys.
//! - Gathered reservations are first looked up with one `MGET` while most turn out to be replays: a tenth of the work for
//!   the server. Absent keys are then reserved; an existing value is what `SET … NX GET` would have answered.
//! - A batch is bounded by the size of its requests, and by the size of its answers as estimated from the latest ones.
//! - A batch belongs to its lane. If a caller goes away before its operation is sent, the operation is dropped, unless it
//!   ends an attempt: then it was handed over.
//! - If replicas have to confirm, each exchange ends with a write of its own and `WAIT`, on the same connection.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use redis::{Cmd, Pipeline, ServerError, Value};

use super::Script;
use super::connection::{Connection, Failure, Refusal};
use super::limits::SURE;
use crate::clock::{Clock, Instant};
use crate::record::format::millis;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Handle, Mutex, MutexGuard, lock};

#[cfg(all(test, shuttle))]
mod interleavings;

/// Batches in flight at a time. First runs keep the server busy with scripts, so one batch should always be ready for it;
/// replays keep the client busy, and more batches would only be smaller.
const LANES: usize = 3;
const LANES_FOR_REPLAYS: usize = 2;
/// The most operations in one batch.
const BATCH: usize = 256;
/// A batch with this many bytes of keys and values takes no more operations.
const BATCH_BYTES: usize = 256 * 1024;
/// Bytes of records that one exchange may bring, if each is as large as the latest ones.
const ANSWER_BYTES: usize = 1024 * 1024;
/// The assumed size of a record before any has arrived.
const FIRST_RECORD: usize = 64 * 1024;
/// Keys in one script call: it bounds how long the server does nothing else (about 0.14 ms).
const FINISHED_AT_ONCE: usize = 64;
/// A batch of this many reservations looks its keys up before it reserves, if it expects replays.
const LOOK_FIRST: usize = 8;
/// Why an operation was not sent.
const STALLED: &str = "the server did not answer what was sent before";
/// The error code of a script that found a damaged record.
pub(super) const DAMAGED: &str = "DAMAGED";
/// Writes to a key without changing anything.
const TOUCH: &str = include_str!("../touch.lua");

/// The scripts as the server knows them.
#[derive(Debug)]
pub(super) struct Scripts {
    finish: Script,
    finish_one: Script,
    pub(super) inspect: Script,
    pub(super) release: Script,
    pub(super) renew: Script,
    pub(super) reopen: Script,
    pub(super) take: Script,
    pub(super) watch: Script,
}

impl Scripts {
    pub(super) const SOURCES: [&str; 8] = [
        include_str!("../finish.lua"),
        include_str!("../finish_one.lua"),
        include_str!("../inspect.lua"),
        include_str!("../release.lua"),
        include_str!("../renew.lua"),
        include_str!("../reopen.lua"),
        include_str!("../take.lua"),
        include_str!("../watch.lua"),
    ];

    /// The scripts by the results of loading [`Scripts::SOURCES`], in their order.
    pub(super) fn new([finish, finish_one, inspect, release, renew, reopen, take, watch]: [Script; 8]) -> Self {
        Self { finish, finish_one, inspect, release, renew, reopen, take, watch }
    }
}

pub(super) type Answer = Result<Value, Failure>;

/// `Ok` if enough replicas have what was answered; otherwise the server's reason, if it gave one.
type Replicated = Result<(), Option<Arc<str>>>;

/// Turns one reply of the server into the answer of its operation.
fn answer(value: Value, replicated: &Replicated) -> Answer {
    match (value, replicated) {
        (Value::ServerError(error), _) => Err(Failure::from(&error)),
        (value, Ok(())) => Ok(value),
        (value, Err(why)) => Err(Failure::Unreplicated(Box::new(value), why.clone())),
    }
}

/// How many replicas must have what an answer says, and how long the server waits for them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Replicas {
    pub(super) count: usize,
    pub(super) within: Duration,
}

impl Replicas {
    /// The time limit of an exchange that ends in `WAIT`, including one queued before it.
    pub(super) fn exchange(self, timeout: Duration) -> Duration {
        timeout.saturating_add(self.within.saturating_mul(2))
    }
}

/// What all connections of a store share.
#[derive(Clone)]
pub(super) struct Terms {
    pub(super) clock: Arc<dyn Clock>,
    /// The time limit of one exchange.
    pub(super) timeout: Duration,
    /// The channel on which ends of attempts are published.
    pub(super) channel: Arc<str>,
    pub(super) scripts: Arc<Scripts>,
    /// Whether a command may name only one key, as in a cluster.
    pub(super) one_key: bool,
}

/// A command, and how to treat it.
#[derive(Clone)]
pub(super) struct Ask {
    command: Cmd,
    /// The source of the script that it calls, for a server that has forgotten it.
    script: Option<&'static str>,
    /// Whether the answer may be a record.
    brings_record: bool,
    /// Whether it is sent even if its caller is gone.
    is_kept: bool,
}

impl Ask {
    /// Calls `script` with these keys and arguments.
    pub(super) fn script<K: AsRef<str>>(
        script: &Script,
        keys: impl ExactSizeIterator<Item = K>,
        args: impl FnOnce(&mut Cmd),
    ) -> Self {
        let mut command = Cmd::new();
        command.arg("EVALSHA").arg(&script.sha).arg(keys.len());
        keys.for_each(|key| {
            command.arg(key.as_ref());
        });
        args(&mut command);
        Self { command, script: Some(script.source), brings_record: false, is_kept: false }
    }

    /// Says that the answer may be a record.
    pub(super) fn that_brings_a_record(self) -> Self {
        Self { brings_record: true, ..self }
    }

    /// Says that it is sent even if its caller is gone.
    pub(super) fn that_is_kept(self) -> Self {
        Self { is_kept: true, ..self }
    }
}

/// The same call with the source of its script, which loads it.
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

/// A completion; its value names the attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Completion<'a> {
    pub(super) key: &'a [u8],
    pub(super) value: &'a [u8],
    pub(super) ttl_ms: u64,
}

/// A reservation or completion in [`Gather::bytes`]: key and value, end to end.
struct Entry {
    slot: usize,
    at: usize,
    key: usize,
    value: usize,
    ttl_ms: u64,
}

/// The operations that gather for one batch. Their bytes share one buffer, so that an operation allocates nothing before
/// its batch is sent.
struct Gather {
    bytes: Vec<u8>,
    reserves: Vec<Entry>,
    completions: Vec<Entry>,
    commands: Vec<(usize, Ask)>,
    /// When the first operation joined.
    opened: Instant,
    replies: Arc<Replies>,
}

impl Gather {
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

    fn entry(&mut self, key: &[u8], value: &[u8], ttl_ms: u64) -> Entry {
        let (slot, at) = (self.replies.open(), self.bytes.len());
        self.bytes.extend_from_slice(key);
        self.bytes.extend_from_slice(value);
        Entry { slot, at, key: key.len(), value: value.len(), ttl_ms }
    }

    /// Adds a reservation; returns the slot of its answer.
    fn add_reserve(&mut self, key: &[u8], value: &[u8], ttl_ms: u64) -> usize {
        let entry = self.entry(key, value, ttl_ms);
        let slot = entry.slot;
        self.reserves.push(entry);
        slot
    }

    fn add_completion(&mut self, completion: &Completion<'_>) -> usize {
        let entry = self.entry(completion.key, completion.value, completion.ttl_ms);
        let slot = entry.slot;
        self.completions.push(entry);
        slot
    }

    fn add_command(&mut self, ask: Ask) -> usize {
        let slot = self.replies.open();
        self.commands.push((slot, ask));
        slot
    }

    /// Removes the operations that might bring more than `records` records.
    fn beyond(&mut self, mut records: usize) -> Later {
        let reserves = self.reserves.split_off(records.min(self.reserves.len()));
        records -= self.reserves.len();
        let is_beyond = |(_, ask): &mut (usize, Ask)| {
            let beyond = ask.brings_record && records == 0;
            records -= usize::from(ask.brings_record && !beyond);
            beyond
        };
        Later { reserves, commands: self.commands.extract_if(.., is_beyond).collect() }
    }

    /// Replaces its operations by the next of `later`, which bring up to `records` records.
    fn next(&mut self, later: &mut Later, records: usize) {
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
        let is_gone = |slot: usize| matches!(slots[slot], Slot::Gone);
        self.reserves.retain(|entry| !is_gone(entry.slot));
        self.commands.retain(|(slot, ask)| ask.is_kept || !is_gone(*slot));
    }

    fn key(&self, entry: &Entry) -> &[u8] {
        &self.bytes[entry.at..entry.at + entry.key]
    }

    fn value(&self, entry: &Entry) -> &[u8] {
        let at = entry.at + entry.key;
        &self.bytes[at..at + entry.value]
    }

    fn reserve(&self, entry: &Entry) -> Cmd {
        reserve(self.key(entry), self.value(entry), entry.ttl_ms)
    }

    fn completion(&self, entry: &Entry) -> Completion<'_> {
        Completion { key: self.key(entry), value: self.value(entry), ttl_ms: entry.ttl_ms }
    }

    /// Empties it for other operations, and keeps its capacity.
    fn clear(&mut self) {
        self.bytes.clear();
        self.reserves.clear();
        self.completions.clear();
        self.commands.clear();
        self.replies = Arc::default();
    }
}

/// The operations of a batch that bring records and are left for further exchanges.
struct Later {
    reserves: Vec<Entry>,
    commands: Vec<(usize, Ask)>,
}

impl Later {
    fn is_empty(&self) -> bool {
        self.reserves.is_empty() && self.commands.is_empty()
    }

    fn slots(&self) -> impl Iterator<Item = usize> {
        self.reserves.iter().map(|entry| entry.slot).chain(self.commands.iter().map(|(slot, _)| *slot))
    }
}

/// The answers of one batch, shared by its lane and its callers.
#[derive(Default)]
struct Replies(Mutex<Vec<Slot>>);

#[derive(Default)]
enum Slot {
    #[default]
    Empty,
    Waiting(Waker),
    Done(Answer),
    /// Its caller is gone.
    Gone,
}

impl Replies {
    fn open(&self) -> usize {
        let mut slots = lock(&self.0);
        slots.push(Slot::Empty);
        slots.len() - 1
    }

    /// Sets answers and wakes their callers, after the lock is released.
    fn deliver(&self, answers: impl Iterator<Item = (usize, Answer)>) {
        let mut wakers = Vec::with_capacity(answers.size_hint().0);
        let mut slots = lock(&self.0);
        for (slot, answer) in answers {
            let slot = &mut slots[slot];
            if matches!(slot, Slot::Gone) {
                continue;
            }
            if let Slot::Waiting(waker) = std::mem::replace(slot, Slot::Done(answer)) {
                wakers.push(waker);
            }
        }
        drop(slots);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Removes the entries whose callers are gone.
    fn retain_waiting(&self, entries: &mut Vec<&Entry>) {
        let slots = lock(&self.0);
        entries.retain(|entry| !matches!(slots[entry.slot], Slot::Gone));
    }

    /// Answers everything that isn't answered yet.
    fn fail(&self, failure: &Failure) {
        let open: Vec<usize> = {
            let slots = lock(&self.0);
            (0..slots.len()).filter(|&i| !matches!(slots[i], Slot::Done(_) | Slot::Gone)).collect()
        };
        self.deliver(open.into_iter().map(|slot| (slot, Err(failure.clone()))));
    }
}

/// Waits for one answer of a batch.
struct Reply {
    replies: Arc<Replies>,
    slot: usize,
    /// Whether the answer was taken.
    taken: bool,
}

impl Future for Reply {
    type Output = Answer;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answer> {
        let this = &mut *self;
        let slot = &mut lock(&this.replies.0)[this.slot];
        match std::mem::replace(slot, Slot::Gone) {
            Slot::Done(answer) => {
                this.taken = true;
                Poll::Ready(answer)
            }
            Slot::Waiting(waker) if waker.will_wake(cx.waker()) => {
                *slot = Slot::Waiting(waker);
                Poll::Pending
            }
            _ => {
                *slot = Slot::Waiting(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if self.taken {
            return;
        }
        // Drops the answer, which may be large, outside of the lock.
        let before = std::mem::replace(&mut lock(&self.replies.0)[self.slot], Slot::Gone);
        drop(before);
    }
}

/// One connection and everything in flight on it.
pub(super) struct Dispatch(Arc<Shared>);

struct Shared {
    connection: Connection,
    terms: Terms,
    replicas: Option<Replicas>,
    runtime: Handle,
    /// Whether a lone command is in flight, driven by its caller.
    lone: AtomicBool,
    /// The running lanes; written under `queue`, read without it as a hint.
    lanes: AtomicUsize,
    /// The share of replays among recent reservations, in 256ths.
    replays: AtomicUsize,
    /// The size of the largest recent record, in bytes.
    record: AtomicUsize,
    queue: Mutex<Queue>,
}

#[derive(Default)]
struct Queue {
    gathers: VecDeque<Gather>,
    spare: Vec<Gather>,
}

struct Lone<'a>(&'a AtomicBool);

impl Drop for Lone<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

impl Dispatch {
    /// Sends over `connection` from tasks of the current runtime. A gathered operation waits at most as long as an exchange
    /// may take. With `replicas`, an answer counts once they have what it says.
    pub(super) fn new(connection: Connection, terms: Terms, replicas: Option<Replicas>) -> Self {
        Self(Arc::new(Shared {
            connection,
            terms,
            replicas,
            runtime: Handle::current(),
            lone: AtomicBool::new(false),
            lanes: AtomicUsize::new(0),
            replays: AtomicUsize::new(0),
            record: AtomicUsize::new(FIRST_RECORD),
            queue: Mutex::default(),
        }))
    }

    /// `SET key value NX GET PX ttl`: nil if it reserved, otherwise the existing value.
    pub(super) async fn reserve(&self, key: &[u8], value: &[u8], ttl_ms: u64) -> Answer {
        if let Some(_lone) = self.0.enter() {
            // Boxed, here and below: under load most operations gather, and would carry the size of this future.
            let answer = Box::pin(self.0.one(&reserve(key, value, ttl_ms))).await;
            self.0.expect_records(record_bytes(&answer));
            return answer;
        }
        self.0.gather(|gather| gather.add_reserve(key, value, ttl_ms)).await
    }

    /// Answers whether the record is this attempt's and now finished.
    pub(super) async fn finish(&self, completion: &Completion<'_>) -> Answer {
        if let Some(_lone) = self.0.enter() {
            let unanswered = HandedOver(Some(|| drop(self.0.gather(|gather| gather.add_completion(completion)))));
            let answer = Box::pin(self.0.finish_alone(*completion)).await;
            unanswered.done();
            return answer;
        }
        self.0.gather(|gather| gather.add_completion(completion)).await
    }

    /// Any other command.
    pub(super) async fn command(&self, ask: Ask) -> Answer {
        if let Some(_lone) = self.0.enter() {
            if !ask.is_kept {
                let answer = Box::pin(self.0.ask(&ask)).await;
                if ask.brings_record {
                    self.0.expect_records(record_bytes(&answer));
                }
                return answer;
            }
            let unanswered = HandedOver(Some(|| drop(self.0.gather(|gather| gather.add_command(ask.clone())))));
            let answer = Box::pin(self.0.ask(&ask)).await;
            unanswered.done();
            return answer;
        }
        self.0.gather(|gather| gather.add_command(ask)).await
    }
}

/// An operation that was handed over and is driven by its caller. If the caller goes away before the answer, a lane takes
/// it: it may not have been sent yet, and sending it twice does no harm.
struct HandedOver<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> HandedOver<F> {
    /// The answer has arrived.
    fn done(mut self) {
        self.0 = None;
    }
}

impl<F: FnOnce()> Drop for HandedOver<F> {
    fn drop(&mut self) {
        if let Some(hand_over) = self.0.take() {
            hand_over();
        }
    }
}

impl Dispatch {
    /// The connection, for questions that are not operations.
    pub(super) fn connection(&self) -> &Connection {
        &self.0.connection
    }

    /// [`reserve`](Self::reserve) for a key whose slot is migrating to this node.
    pub(super) async fn reserve_asking(&self, key: &[u8], value: &[u8], ttl_ms: u64) -> Answer {
        self.asking(reserve(key, value, ttl_ms)).await
    }

    /// [`finish`](Self::finish) for a key whose slot is migrating to this node.
    pub(super) async fn finish_asking(&self, completion: &Completion<'_>) -> Answer {
        self.asking(self.0.finish_one(*completion, true)).await
    }

    /// [`command`](Self::command) for a key whose slot is migrating to this node.
    pub(super) async fn command_asking(&self, ask: Ask) -> Answer {
        let command = match ask.script {
            Some(source) => with_source(&ask.command, source),
            None => ask.command,
        };
        self.asking(command).await
    }

    /// Sent by itself: `ASKING` permits one command.
    async fn asking(&self, command: Cmd) -> Answer {
        let mut pipeline = Pipeline::with_capacity(5);
        pipeline.cmd("ASKING").add_command(command);
        self.0.exchange(&mut pipeline).await?.pop().unwrap_or(Err(Failure::Lost))
    }
}

impl Shared {
    /// One command.
    async fn one(&self, command: &Cmd) -> Answer {
        if self.replicas.is_none() {
            return self.connection.one(command).await;
        }
        let mut pipeline = Pipeline::with_capacity(3);
        pipeline.add_command(command.clone());
        self.exchange(&mut pipeline).await?.pop().unwrap_or(Err(Failure::Lost))
    }

    /// One command; with the source of its script if the server has forgotten it.
    async fn ask(&self, ask: &Ask) -> Answer {
        match (self.one(&ask.command).await, ask.script) {
            // The server restarted, failed over or flushed its scripts: nothing was written.
            (Err(failure), Some(source)) if failure.is_unknown_script() => {
                self.one(&with_source(&ask.command, source)).await
            }
            (answer, _) => answer,
        }
    }

    async fn finish_alone(&self, completion: Completion<'_>) -> Answer {
        match self.one(&self.finish_one(completion, false)).await {
            Err(failure) if failure.is_unknown_script() => self.one(&self.finish_one(completion, true)).await,
            answer => answer,
        }
    }

    /// Many commands, as many answers.
    async fn exchange(&self, pipeline: &mut Pipeline) -> Result<Vec<Answer>, Failure> {
        let Some(Replicas { count, within }) = self.replicas else {
            let values = self.connection.many(pipeline).await?;
            return Ok(values.into_iter().map(|value| answer(value, &Ok(()))).collect());
        };
        // `WAIT` covers the writes of its own connection. A replay, or an operation that finds itself done, writes nothing:
        // its answer would count as confirmed although no replica may have it. Replicas follow one stream, so one write
        // behind all answers covers them all.
        let (asking, key) = match &pipeline.cmd_iter().collect::<Vec<_>>()[..] {
            [first, second, ..] if argument(first, 0) == b"ASKING" => (true, key_of(second).to_vec()),
            [first, ..] => (false, key_of(first).to_vec()),
            [] => return Ok(Vec::new()),
        };
        if asking {
            pipeline.cmd("ASKING");
        }
        pipeline.cmd("EVAL").arg(TOUCH).arg(1).arg(key);
        pipeline.cmd("WAIT").arg(count).arg(millis(within).max(1));
        let mut values = self.connection.many(pipeline).await?;
        let (confirmed, touched) = (values.pop(), values.pop());
        if asking {
            values.pop();
        }
        let replicated = match (confirmed, touched) {
            (Some(Value::Int(have)), Some(Value::Int(1))) if usize::try_from(have).is_ok_and(|have| have >= count) => {
                Ok(())
            }
            (Some(Value::ServerError(error)), _) | (_, Some(Value::ServerError(error))) => Err(Some(said(&error))),
            _ => Err(None),
        };
        Ok(values.into_iter().map(|value| answer(value, &replicated)).collect())
    }

    /// The right to send a command by itself, if nothing else is in flight.
    fn enter(&self) -> Option<Lone<'_>> {
        let alone = self.lanes.load(Ordering::Relaxed) == 0 && !self.lone.swap(true, Ordering::Relaxed);
        alone.then(|| Lone(&self.lone))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// The batch a lane sends next; `None` gives the lane's place back. Both under one lock, or an operation that gathers
    /// in between would be stranded.
    fn next(&self) -> Option<Gather> {
        let mut queue = self.queue();
        let next = queue.gathers.pop_front();
        if next.is_none() {
            self.lanes.fetch_sub(1, Ordering::Relaxed);
        }
        next
    }

    /// Keeps the buffers of a sent batch for another, unless they grew unusually large.
    fn keep(&self, mut gather: Gather) {
        gather.clear();
        let mut queue = self.queue();
        if queue.spare.len() < LANES && gather.bytes.capacity() <= 2 * BATCH_BYTES {
            queue.spare.push(gather);
        }
    }

    /// Adds an operation to the gathering batch, and makes sure that a lane will take it.
    fn gather(self: &Arc<Self>, add: impl FnOnce(&mut Gather) -> usize) -> Reply {
        let mut queue = self.queue();
        if queue.gathers.back().is_none_or(Gather::is_full) {
            let opened = self.terms.clock.now();
            let gather = queue.spare.pop().map(|spare| Gather { opened, ..spare });
            queue.gathers.push_back(gather.unwrap_or_else(|| Gather::new(opened)));
        }
        let gather = queue.gathers.back_mut().expect("just pushed");
        let slot = add(gather);
        let reply = Reply { replies: Arc::clone(&gather.replies), slot, taken: false };
        let lanes = self.lanes.load(Ordering::Relaxed);
        let limit = match self.replicas {
            // `WAIT` blocks whatever comes after it on its connection.
            Some(_) => 1,
            None if self.expects_replays() => LANES_FOR_REPLAYS,
            None => LANES,
        };
        if lanes < limit {
            self.lanes.store(lanes + 1, Ordering::Relaxed);
            drop(queue);
            self.runtime.spawn(Lane { shared: Arc::clone(self), running: true }.run());
        }
        reply
    }

    /// Whether most recent reservations were replays.
    fn expects_replays(&self) -> bool {
        self.replays.load(Ordering::Relaxed) >= 128
    }

    /// Notes how many of `asked` reservations found a value.
    fn met(&self, values: usize, asked: usize) {
        let before = self.replays.load(Ordering::Relaxed);
        self.replays.store((3 * before + 256 * values / asked.max(1)) / 4, Ordering::Relaxed);
    }

    /// Notes the largest record among some answers, in bytes. The expected size falls by half at most, so it takes a while
    /// until small records are expected again.
    fn expect_records(&self, largest: usize) {
        let before = self.record.load(Ordering::Relaxed);
        let now = largest.max(before / 2);
        if now != before {
            self.record.store(now, Ordering::Relaxed);
        }
    }

    /// How many records one exchange may bring.
    fn records_at_once(&self) -> usize {
        (ANSWER_BYTES / self.record.load(Ordering::Relaxed).max(1)).max(1)
    }

    async fn send(&self, gather: &mut Gather) {
        let replies = Arc::clone(&gather.replies);
        gather.forget_gone();
        // Each by itself, after the others: a server that refuses its size closes the connection, and a batch would lose
        // the answer.
        let large: Vec<Entry> = gather.completions.extract_if(.., |entry| entry.value >= SURE).collect();
        let mut later = gather.beyond(self.records_at_once());
        loop {
            if let Err(failure) = self.send_small(gather, &replies).await {
                let unsent = later.slots().chain(large.iter().map(|entry| entry.slot));
                replies.deliver(unsent.map(|slot| (slot, Err(Failure::NotSent(STALLED.into())))));
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
    async fn send_small(&self, gather: &mut Gather, replies: &Replies) -> Result<(), Failure> {
        let at_once = if self.terms.one_key { 1 } else { FINISHED_AT_ONCE };
        let calls: Vec<Range<usize>> = chunks(gather.completions.len(), at_once).collect();
        let look_first = gather.reserves.len() >= LOOK_FIRST && self.expects_replays() && !self.terms.one_key;

        let mut pipeline = Pipeline::with_capacity(gather.reserves.len() + gather.commands.len() + calls.len());
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
        for (slot, Ask { command, script, brings_record, .. }) in gather.commands.drain(..) {
            asked.push((slot, pipeline.len(), script, brings_record));
            pipeline.add_command(command);
        }
        for call in &calls {
            pipeline.add_command(self.finish(gather, call, false));
        }
        if pipeline.is_empty() {
            return Ok(());
        }
        let mut answers = self.exchange(&mut pipeline).await?.into_iter();
        // A missing answer must not become nil: nil means "reserved".
        let mut next = || answers.next().unwrap_or(Err(Failure::Lost));

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
            self.met(met, gather.reserves.len());
        }
        // The server lost its scripts (restart, failover, SCRIPT FLUSH): these calls wrote nothing.
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
            again.add_command(self.finish(gather, call, true));
        }
        if let Some(largest) = largest {
            self.expect_records(largest);
        }

        if again.is_empty() {
            return Ok(());
        }
        let mut answers = self.exchange(&mut again).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Err(Failure::Lost));
        replies.deliver(absent.into_iter().map(|entry| (entry.slot, next())));
        replies.deliver(unknown.into_iter().map(|slot| (slot, next())));
        for call in unfinished {
            settle(replies, &gather.completions[call], next());
        }
        Ok(())
    }

    /// Delivers the existing values. Returns the reservations that found none and whose callers still wait.
    fn found<'a>(&self, gather: &'a Gather, found: Answer, largest: &mut Option<usize>) -> Vec<&'a Entry> {
        let (found, replicated) = match found {
            Ok(found) => (found, Ok(())),
            Err(Failure::Unreplicated(found, why)) => (*found, Err(why)),
            // The look has written nothing, so the callers get its failure.
            Err(failure) => {
                gather.replies.deliver(gather.reserves.iter().map(|entry| (entry.slot, Err(failure.clone()))));
                return Vec::new();
            }
        };
        let values = match found {
            Value::Array(values) if values.len() == gather.reserves.len() => values,
            _ => {
                gather.replies.deliver(gather.reserves.iter().map(|entry| (entry.slot, Err(Failure::Lost))));
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
        self.met(gather.reserves.len() - absent.len(), gather.reserves.len());
        gather.replies.retain_waiting(&mut absent);
        absent
    }

    fn finish(&self, gather: &Gather, call: &Range<usize>, with_source: bool) -> Cmd {
        if self.terms.one_key {
            return self.finish_one(gather.completion(&gather.completions[call.start]), with_source);
        }
        let completions = gather.completions[call.clone()].iter().map(|entry| gather.completion(entry));
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

/// A task that sends batches until nothing gathers any more.
struct Lane {
    shared: Arc<Shared>,
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
            let mut unanswered = Unanswered(Some(Arc::clone(&gather.replies)));
            if shared.terms.clock.now().saturating_since(gather.opened) > shared.connection.patience() {
                // The server stalls. Operations that waited this long are not sent: none takes longer than two time-outs,
                // unless the server keeps answering others, and its caller knows that nothing was written.
                gather.replies.fail(&Failure::NotSent(STALLED.into()));
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
    /// Only a lane that panicked or whose runtime is gone is still running here. It gives its place back and fails the
    /// waiting batches, since no other lane may come.
    fn drop(&mut self) {
        if self.running {
            let mut queue = self.shared.queue();
            self.shared.lanes.fetch_sub(1, Ordering::Relaxed);
            let waiting = std::mem::take(&mut queue.gathers);
            drop(queue);
            for gather in waiting {
                gather.replies.fail(&Failure::NotSent("the runtime of the connection has shut down".into()));
            }
        }
    }
}

/// Fails what a lane leaves unanswered if its task is dropped or panics.
struct Unanswered(Option<Arc<Replies>>);

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(replies) = &self.0 {
            replies.fail(&Failure::Lost);
        }
    }
}

fn chunks(len: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len).step_by(size).map(move |from| from..len.min(from + size))
}

/// Answers the keys of one script call.
fn settle(replies: &Replies, entries: &[Entry], settled: Answer) {
    let (value, replicated) = match settled {
        Ok(value) => (value, Ok(())),
        Err(Failure::Unreplicated(value, why)) => (*value, Err(why)),
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
            Some(b'E') => Err(Failure::Refused(Refusal::read(&error))),
            _ => Err(Failure::Lost),
        };
        (entry.slot, answer)
    }));
}

/// The text of an error of the server.
fn said(error: &ServerError) -> Arc<str> {
    format!("{} {}", error.code(), error.details().unwrap_or_default()).into()
}

/// The size of the record in an answer, in bytes; 0 if it holds none.
fn record_bytes(answer: &Answer) -> usize {
    let value = match answer {
        Ok(value) => value,
        Err(Failure::Unreplicated(value, _)) => value,
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

/// The first key that a command names.
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

fn reserve(key: &[u8], value: &[u8], ttl_ms: u64) -> Cmd {
    let mut command = Cmd::with_capacity(7, key.len() + value.len() + 32);
    command.arg("SET").arg(key).arg(value).arg("NX").arg("GET").arg("PX").arg(ttl_ms);
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
