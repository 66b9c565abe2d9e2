//! The two threads of a store handle, which do all work on the file: no task of the runtime ever waits for a disk.
//!
//! - The *writer* takes everything that waits and makes one transaction of it: one lock, one commit, one wait for the
//!   disk. Before a commit that waits for the disk it gives those it has just answered a moment to come back; a call that
//!   comes alone is not delayed.
//! - The *reader* answers what changes nothing, on a connection of its own, so that it waits for no lock and no disk: in
//!   WAL mode it sees what is committed. Reservations go through it while most turn out to be replays; what has to be
//!   written is handed on to the writer, which decides anew.
//! - While duplicates wait, the reader also looks whether anybody committed anything, and then has them look again.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rusqlite::Statement;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::Synchronous;
use super::connect::{
    Connected, Database, breaks_connection, failed, is_busy, not_committed, not_written, unavailable,
};
use super::table::{Table, Trouble};
use crate::clock::{Clock, race, wall_millis};
use crate::stores::waiting::Waiting;
use crate::sync::lock;
use crate::{Finish, Inspection, Key, Lease, Release, Reservation, Reserve, StoreError, StoreErrorKind, Write};

/// Operations in one transaction: a bound on how long other processes wait for the lock.
const BATCH: usize = 256;
/// Bytes of results above which a transaction takes no more.
const BATCH_BYTES: usize = 4 * 1024 * 1024;
/// Operations in a batch from which on the writer waits for those it has answered, how long, and for how many batches it
/// does not if they stay away.
const COMPANY: usize = 4;
const WAIT_FOR_COMPANY: Duration = Duration::from_micros(100);
const LONGEST_SKIP: u32 = 64;
/// Rows that clean-up looks at for each reservation: more than one, so that they can't pile up.
const CLEANED_UP: u32 = 2;
/// How often the reader looks for commits of other handles while somebody waits: this, and as much more for each waiter.
const POLL: Duration = Duration::from_millis(5);
const POLL_FOR_EACH: Duration = Duration::from_micros(100);

/// What is asked of a thread.
#[derive(Debug)]
pub(super) enum Ask {
    Reserve(Reserve),
    Renew(Vec<Lease>),
    Finish(Lease, Finish),
    Release(Lease, Release),
    Reopen(Key, u32),
    Purge(u32),
    /// To be answered after everything that was asked before.
    Pass,
    Inspect(Key),
    IsPending(Key, u32),
}

impl Ask {
    fn bytes(&self) -> usize {
        match self {
            Self::Finish(_, finish) => finish.payload().stored_bytes(),
            _ => 0,
        }
    }

    /// The key whose waiters are to look again after this answer.
    fn wakes(&self, answered: &Answered) -> Option<&Key> {
        match (self, answered) {
            (Self::Reserve(Reserve { key, .. }), Ok(Answer::Reservation(Reservation::Reserved { .. })))
            | (
                Self::Finish(Lease { key, .. }, _) | Self::Release(Lease { key, .. }, _) | Self::Reopen(key, _),
                Ok(Answer::Write(Write::Done)),
            ) => Some(key),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Answer {
    Reservation(Reservation),
    Writes(Vec<Write>),
    Write(Write),
    Removed(u64),
    Passed,
    Inspection(Option<Inspection>),
    IsPending(bool),
}

type Answered = Result<Answer, StoreError>;

struct Op {
    number: u64,
    ask: Ask,
    reply: oneshot::Sender<Answered>,
}

impl Op {
    fn answer(self, answer: Answered) {
        // Whoever has gone away needs no answer.
        let _ = self.reply.send(answer);
    }
}

/// What waits for one thread.
#[derive(Default)]
struct Queue {
    gathered: Mutex<Gathered>,
    ready: Condvar,
}

#[derive(Default)]
struct Gathered {
    ops: VecDeque<Op>,
    /// How many operations wake the thread; 0 while it is awake.
    wakes_at: usize,
    closed: bool,
}

impl Queue {
    /// Adds an operation, unless `capacity` wait already.
    fn push(&self, op: Op, capacity: usize) -> Result<(), &'static str> {
        let mut gathered = lock(&self.gathered);
        if gathered.closed {
            return Err("the thread of the store has ended");
        }
        if gathered.ops.len() >= capacity {
            return Err("too many calls wait for the file");
        }
        gathered.ops.push_back(op);
        let wakes = gathered.wakes_at > 0 && gathered.ops.len() >= gathered.wakes_at;
        if wakes {
            gathered.wakes_at = 0;
        }
        drop(gathered);
        if wakes {
            self.ready.notify_one();
        }
        Ok(())
    }

    /// Waits for operations, if a time is given for that long, and takes those that are there. False once there will be
    /// no more.
    fn take(&self, batch: &mut Vec<Op>, at_most: Option<Duration>) -> bool {
        let mut gathered = lock(&self.gathered);
        while gathered.ops.is_empty() {
            if gathered.closed {
                return false;
            }
            gathered.wakes_at = 1;
            match at_most {
                None => gathered = self.ready.wait(gathered).unwrap_or_else(PoisonError::into_inner),
                Some(at_most) => {
                    let waited = self.ready.wait_timeout(gathered, at_most).unwrap_or_else(PoisonError::into_inner);
                    gathered = waited.0;
                    if waited.1.timed_out() {
                        gathered.wakes_at = 0;
                        break;
                    }
                }
            }
        }
        let mut bytes = 0;
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(op) = gathered.ops.pop_front() else { break };
            bytes += op.ask.bytes();
            batch.push(op);
        }
        true
    }

    /// Waits until `answered` operations more are there, and no longer than `at_most`. Says how many came.
    fn gather(&self, answered: usize, at_most: Duration) -> usize {
        let mut gathered = lock(&self.gathered);
        let before = gathered.ops.len();
        let expected = (before + answered).min(BATCH);
        if before >= expected || gathered.closed {
            return answered;
        }
        gathered.wakes_at = expected;
        let waited = self.ready.wait_timeout_while(gathered, at_most, |it| it.wakes_at > 0 && !it.closed);
        gathered = waited.unwrap_or_else(PoisonError::into_inner).0;
        gathered.wakes_at = 0;
        gathered.ops.len() - before
    }

    /// Removes an operation that nobody has taken up. False if somebody has.
    fn forget(&self, number: u64) -> bool {
        let mut gathered = lock(&self.gathered);
        let at = gathered.ops.iter().position(|op| op.number == number);
        at.and_then(|at| gathered.ops.remove(at)).is_some()
    }

    fn is_closed(&self) -> bool {
        lock(&self.gathered).closed
    }

    fn close(&self) {
        lock(&self.gathered).closed = true;
        self.ready.notify_all();
    }
}

/// What the handle and its threads share.
pub(super) struct Core {
    pub(super) database: Database,
    pub(super) waiting: Waiting,
    /// How many duplicates wait.
    waiters: AtomicUsize,
    writes: Queue,
    reads: Queue,
    numbers: AtomicU64,
    /// How many of 256 reservations were replays lately, or other answers that change nothing.
    replays: AtomicUsize,
}

/// Opens the file and starts the threads.
pub(super) async fn start(database: Database) -> Result<Arc<Core>, StoreError> {
    let (reply, opened) = oneshot::channel();
    spawn("idem-sqlite", move || {
        let opened = database.create().and_then(|writer| Ok((writer, database.reconnect()?)));
        let (writer, reader) = match opened {
            Ok(connected) => connected,
            Err(error) => return drop(reply.send(Err(error))),
        };
        let core = Arc::new(Core {
            database,
            waiting: Waiting::default(),
            waiters: AtomicUsize::new(0),
            writes: Queue::default(),
            reads: Queue::default(),
            numbers: AtomicU64::new(0),
            replays: AtomicUsize::new(0),
        });
        let reading = Arc::clone(&core);
        let reading = match spawn("idem-sqlite-read", move || reading.read(reader)) {
            Ok(reading) => reading,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if reply.send(Ok(Arc::clone(&core))).is_err() {
            // Nobody waits for the store any more.
            core.close();
        }
        core.write(writer, reading);
    })?;
    opened.await.unwrap_or_else(|_| Err(unavailable("the thread of the store has ended".to_owned())))
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, StoreError> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map_err(|error| unavailable(format!("no thread can be started: {error}")))
}

/// Ends the queue of a thread that ends, so that nobody waits for it.
struct Ending<'a>(&'a Queue);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.close();
        lock(&self.0.gathered).ops.clear();
    }
}

/// A waiting duplicate is counted until this is dropped.
pub(super) struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Core {
    /// Lets the threads end once they have done what was asked of them.
    pub(super) fn close(&self) {
        self.reads.close();
        self.writes.close();
    }

    /// Counts a duplicate that waits.
    pub(super) fn count_waiter(&self) -> Counted<'_> {
        self.waiters.fetch_add(1, Ordering::SeqCst);
        Counted(&self.waiters)
    }

    fn waiters(&self) -> usize {
        self.waiters.load(Ordering::SeqCst)
    }

    pub(super) async fn reserve(&self, request: Reserve) -> Answered {
        // While most are replays, the reader answers most of them.
        let queue = if self.replays.load(Ordering::Relaxed) >= 128 { &self.reads } else { &self.writes };
        let answer = self.ask(queue, Ask::Reserve(request)).await?;
        let changed_nothing = !matches!(answer, Answer::Reservation(Reservation::Reserved { .. }));
        let before = self.replays.load(Ordering::Relaxed);
        self.replays.store(before - before / 16 + if changed_nothing { 16 } else { 0 }, Ordering::Relaxed);
        Ok(answer)
    }

    pub(super) async fn ask_writer(&self, ask: Ask) -> Answered {
        self.ask(&self.writes, ask).await
    }

    pub(super) async fn ask_reader(&self, ask: Ask) -> Answered {
        self.ask(&self.reads, ask).await
    }

    async fn ask(&self, queue: &Queue, ask: Ask) -> Answered {
        let options = &self.database.options;
        let (reply, answer) = oneshot::channel();
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        queue.push(Op { number, ask, reply }, options.queue_capacity).map_err(|why| unavailable(why.to_owned()))?;
        // Outside of a runtime nobody polls again: the operation was handed over, and that is all.
        let answered = match Handle::try_current() {
            Ok(_) => race(answer, self.database.clock.sleep(options.response_timeout)).await,
            Err(_) => Some(answer.await),
        };
        match answered {
            Some(Ok(answer)) => answer,
            Some(Err(_)) => Err(unknown("the thread of the store has ended")),
            None if self.reads.forget(number) || self.writes.forget(number) => {
                Err(unavailable("the file was busy for too long; nothing was written".to_owned()))
            }
            None => Err(unknown("no answer from the file in time")),
        }
    }

    /// The writer.
    fn write(&self, connected: Connected, reading: JoinHandle<()>) {
        let _ending = Ending(&self.writes);
        let (mut connected, mut reading) = (Some(connected), Some(reading));
        let mut batch = Vec::with_capacity(BATCH);
        while self.writes.take(&mut batch, None) {
            match connected.take().map_or_else(|| self.database.reconnect(), Ok) {
                Ok(connected) => {
                    self.write_to(&connected, &mut batch);
                    // The last connection to be closed tidies the file up. If the reader's were closed at the same
                    // moment, each would take the other's for one that stays.
                    if self.writes.is_closed()
                        && let Some(reading) = reading.take()
                    {
                        let _ = reading.join();
                    }
                }
                Err(error) => fail(&mut batch, &error),
            }
        }
    }

    /// Writes until the connection is of no use any more, or the store is closed.
    fn write_to(&self, connected: &Connected, batch: &mut Vec<Op>) {
        let mut writer = match Session::new(self, connected, "BEGIN IMMEDIATE") {
            Ok(writer) => writer,
            Err(error) => return fail(batch, &not_written(&error)),
        };
        let mut company = Company::default();
        loop {
            let answered = batch.len();
            if !writer.write(batch, true) {
                return;
            }
            // Where a commit waits for no disk, it is cheap, and the tasks had better work meanwhile.
            if self.database.options.synchronous == Synchronous::Full {
                company.wait(&self.writes, answered);
            }
            if !self.writes.take(batch, None) {
                return;
            }
        }
    }

    /// The reader.
    fn read(&self, connected: Connected) {
        let _ending = Ending(&self.reads);
        let mut connected = Some(connected);
        let mut batch = Vec::with_capacity(BATCH);
        while self.reads.take(&mut batch, self.poll()) {
            match connected.take().map_or_else(|| self.database.reconnect(), Ok) {
                Ok(connected) => self.read_from(&connected, &mut batch),
                Err(error) => fail(&mut batch, &error),
            }
            // Whoever waits asks, and learns what is wrong.
            self.waiting.wake_all();
        }
    }

    fn read_from(&self, connected: &Connected, batch: &mut Vec<Op>) {
        let mut reader = match Session::new(self, connected, "BEGIN") {
            Ok(reader) => reader,
            Err(error) => return fail(batch, &not_written(&error)),
        };
        let mut version = None;
        while reader.read(batch, &mut version) && self.reads.take(batch, self.poll()) {}
    }

    /// Hands an operation from the reader to the writer. If that has ended, the caller hears that nobody answers.
    fn hand_on(&self, op: Op) {
        let _ = self.writes.push(op, usize::MAX);
    }

    /// How soon the reader looks for commits of others; `None` while nobody waits.
    fn poll(&self) -> Option<Duration> {
        match self.waiters() {
            0 => None,
            waiters => Some(POLL + POLL_FOR_EACH.saturating_mul(u32::try_from(waiters).unwrap_or(u32::MAX))),
        }
    }
}

/// Waits for those who were just answered: most come back at once, one by one, with the next step of theirs, and a commit
/// that does not wait for them is made for a few. Whoever comes alone meets nobody who waits.
struct Company {
    /// How many batches are not waited for, because those who were answered did not come back.
    skip: u32,
    next_skip: u32,
}

impl Default for Company {
    fn default() -> Self {
        Self { skip: 0, next_skip: 1 }
    }
}

impl Company {
    fn wait(&mut self, queue: &Queue, answered: usize) {
        if answered < COMPANY {
            return;
        }
        if self.skip > 0 {
            self.skip -= 1;
            return;
        }
        if queue.gather(answered, WAIT_FOR_COMPANY) >= answered / 4 {
            self.next_skip = 1;
        } else {
            self.skip = self.next_skip;
            self.next_skip = (self.next_skip * 2).min(LONGEST_SKIP);
        }
    }
}

fn fail(batch: &mut Vec<Op>, error: &StoreError) {
    for op in batch.drain(..) {
        op.answer(Err(StoreError::new(error.kind(), error.to_string())));
    }
}

fn unknown(message: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unknown, message)
}

/// Why a transaction did not come about.
struct Failure {
    error: StoreError,
    /// Whether the connection is of no use any more.
    broken: bool,
    /// Whether the operations may do better one by one.
    alone: bool,
}

impl Failure {
    /// Nothing of the transaction was written.
    fn nothing_written(error: &rusqlite::Error, alone: bool) -> Self {
        Self { error: not_written(error), broken: breaks_connection(error), alone }
    }
}

/// A connection with its prepared statements.
struct Session<'c> {
    core: &'c Core,
    connected: &'c Connected,
    table: Table<'c>,
    begin: Statement<'c>,
    commit: Statement<'c>,
    version: Statement<'c>,
    answers: Vec<Answered>,
}

impl<'c> Session<'c> {
    fn new(core: &'c Core, connected: &'c Connected, begin: &str) -> rusqlite::Result<Self> {
        let connection = &connected.connection;
        Ok(Self {
            core,
            connected,
            table: Table::new(connection, &core.database.options.table),
            begin: connection.prepare(begin)?,
            commit: connection.prepare("COMMIT")?,
            version: connection.prepare("PRAGMA data_version")?,
            answers: Vec::with_capacity(BATCH),
        })
    }

    /// Makes one transaction of the batch and answers it. False if the connection is of no use any more.
    fn write(&mut self, batch: &mut Vec<Op>, clean_up: bool) -> bool {
        self.answers.clear();
        match self.transact(batch, clean_up) {
            Ok(()) => {
                if self.core.waiters() > 0 {
                    let ended = batch.iter().zip(&self.answers).filter_map(|(op, answer)| op.ask.wakes(answer));
                    ended.for_each(|key| self.core.waiting.wake(key.as_str()));
                }
                for (op, answer) in batch.drain(..).zip(self.answers.drain(..)) {
                    op.answer(answer);
                }
                true
            }
            // What one of them can't have, the others may; nor is clean-up worth a failure.
            Err(Failure { alone: true, broken: false, .. }) if clean_up || batch.len() > 1 => {
                let mut healthy = true;
                for op in std::mem::take(batch) {
                    healthy &= self.write(&mut vec![op], false);
                }
                healthy
            }
            Err(Failure { error, broken, .. }) => {
                fail(batch, &error);
                !broken
            }
        }
    }

    /// Gets the lock. Replays need none and are answered at once if it takes a while. False if nothing is left to do.
    fn begin(&mut self, batch: &mut Vec<Op>) -> Result<bool, Failure> {
        let Core { database, .. } = self.core;
        database.check_file(self.connected).map_err(|error| Failure { error, broken: true, alone: false })?;
        let mut begun = self.begin.execute([]);
        if begun.as_ref().is_err_and(is_busy) {
            let now = wall_millis();
            let mut rest = Vec::with_capacity(batch.len());
            for op in batch.drain(..) {
                match &op.ask {
                    Ask::Reserve(request) => match self.table.answer(request, now) {
                        Ok(Some(answer)) => op.answer(Ok(Answer::Reservation(answer))),
                        _ => rest.push(op),
                    },
                    _ => rest.push(op),
                }
            }
            *batch = rest;
            if batch.is_empty() {
                return Ok(false);
            }
            begun = database.patiently(|| self.begin.execute([]));
        }
        begun.map(|_| true).map_err(|error| Failure::nothing_written(&error, false))
    }

    fn transact(&mut self, batch: &mut Vec<Op>, clean_up: bool) -> Result<(), Failure> {
        if !self.begin(batch)? {
            return Ok(());
        }
        let connection = &self.connected.connection;
        let now = wall_millis();
        let mut reservations = 0;
        for op in &*batch {
            let answer = match perform(&mut self.table, &op.ask, now) {
                // A full disk and the like roll the whole transaction back.
                Err(Trouble::Sqlite(error)) if connection.is_autocommit() => {
                    return Err(Failure::nothing_written(&error, true));
                }
                answer => answer.map_err(|trouble| failed(&trouble)),
            };
            self.answers.push(answer);
            reservations += u32::from(matches!(op.ask, Ask::Reserve(_)));
        }
        if clean_up
            && reservations > 0
            && let Err(error) = self.table.clean_up(now, CLEANED_UP * reservations)
        {
            tracing::debug!(%error, "expired records could not be cleaned up");
            if connection.is_autocommit() {
                return Err(Failure::nothing_written(&error, true));
            }
        }
        self.commit.execute([]).map(drop).map_err(|error| {
            let rolled_back = connection.is_autocommit() || connection.execute_batch("ROLLBACK").is_ok();
            let failure = not_committed(&error);
            let alone = failure.kind() == StoreErrorKind::Full;
            Failure { error: failure, broken: breaks_connection(&error) || !rolled_back, alone }
        })
    }

    /// Answers what changes nothing, from one snapshot, and hands the rest on to the writer. False if the connection is
    /// of no use any more. `version` is what the file was like when waiting duplicates were last told to look.
    fn read(&mut self, batch: &mut Vec<Op>, version: &mut Option<i64>) -> bool {
        let looked = self.look(batch, version);
        let Err(failure) = looked else { return true };
        if !self.connected.connection.is_autocommit() {
            self.connected.connection.execute_batch("ROLLBACK").ok();
        }
        fail(batch, &failure.error);
        !failure.broken
    }

    fn look(&mut self, batch: &mut Vec<Op>, version: &mut Option<i64>) -> Result<(), Failure> {
        let Core { database, .. } = self.core;
        database.check_file(self.connected).map_err(|error| Failure { error, broken: true, alone: false })?;
        let failed_to_read = |error: rusqlite::Error| Failure::nothing_written(&error, false);
        let polls = self.core.waiters() > 0;
        let transaction = batch.len() + usize::from(polls) > 1;
        if transaction {
            self.begin.execute([]).map_err(failed_to_read)?;
        }
        if polls {
            let found = database.patiently(|| self.version.query_row([], |row| row.get(0))).map_err(failed_to_read)?;
            // Before the look-ups of this batch, so that a commit after them is found by the next poll.
            if version.replace(found) != Some(found) {
                self.core.waiting.wake_all();
            }
        }
        let now = wall_millis();
        let mut answers = Vec::with_capacity(batch.len());
        for op in &*batch {
            let answer = database.patiently(|| match &op.ask {
                Ask::Reserve(request) => quietly(self.table.answer(request, now).map(|it| it.map(Answer::Reservation))),
                Ask::Inspect(_) | Ask::IsPending(..) => quietly(perform(&mut self.table, &op.ask, now).map(Some)),
                _ => Ok(Ok(None)),
            });
            answers.push(match answer.map_err(Trouble::Sqlite).and_then(|answer| answer) {
                Err(Trouble::Sqlite(error)) if breaks_connection(&error) => {
                    return Err(failed_to_read(error));
                }
                answer => answer.map_err(|trouble| failed(&trouble)).transpose(),
            });
        }
        if transaction {
            self.commit.execute([]).map_err(failed_to_read)?;
        }
        for (op, answer) in batch.drain(..).zip(answers) {
            match answer {
                Some(answer) => op.answer(answer),
                None => self.core.hand_on(op),
            }
        }
        Ok(())
    }
}

/// Sorts out what `patiently` is to judge.
fn quietly<T>(answer: Result<T, Trouble>) -> rusqlite::Result<Result<T, Trouble>> {
    match answer {
        Err(Trouble::Sqlite(error)) => Err(error),
        answer => Ok(answer),
    }
}

fn perform(table: &mut Table<'_>, ask: &Ask, now: i64) -> Result<Answer, Trouble> {
    Ok(match ask {
        Ask::Reserve(request) => Answer::Reservation(table.reserve(request, now)?),
        Ask::Renew(leases) => {
            Answer::Writes(leases.iter().map(|lease| table.renew(lease, now)).collect::<Result<_, _>>()?)
        }
        Ask::Finish(lease, finish) => Answer::Write(table.finish(lease, finish, now)?),
        Ask::Release(lease, release) => Answer::Write(table.release(lease, *release, now)?),
        Ask::Reopen(key, attempt) => Answer::Write(table.reopen(key, *attempt, now)?),
        Ask::Purge(limit) => Answer::Removed(table.clean_up(now, *limit)?),
        Ask::Pass => Answer::Passed,
        Ask::Inspect(key) => Answer::Inspection(table.inspect(key, now)?),
        Ask::IsPending(key, attempt) => Answer::IsPending(table.is_pending(key, *attempt, now)?),
    })
}
