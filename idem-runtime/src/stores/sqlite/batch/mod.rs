//! The threads of a store handle, which work on the file. Tasks of a runtime never wait for the disk, except for lone
//! replays ([`inline_read`](super::inline_read)). Each thread starts at first use, and has its own connection.
//!
//! - The *writer* puts all waiting operations into one transaction: one lock, one commit, one wait for the disk. Before
//!   a commit that waits for the disk, the writer waits briefly for the next operations of the callers that it has just
//!   answered, and puts them into the same transaction. A lone call is not delayed.
//! - The *reader* answers operations that change nothing. In WAL mode the reader sees the committed data without
//!   waiting for a lock. While most reservations turn out to be replays, reservations go to the reader. The reader
//!   passes a reservation that has to write on to the writer, which decides anew. While duplicates wait, the reader
//!   also checks for commits of other handles; after such a commit the duplicates read their records again.
//! - The *upkeep* thread renews leases and makes late writes. Renewals and late writes do not wait in the queue of
//!   calls. While another connection holds the lock, the upkeep thread keeps trying to get it, and the writer of the
//!   same handle lets the upkeep thread go first. The renewal of many leases takes several short transactions; between
//!   two of them the upkeep thread leaves the lock to other writers.
//!
//! An operation whose caller is gone is not run, unless the operation ends an attempt. The time of a transaction is
//! limited, as are the bytes of its requests and answers; the next transaction takes the remaining operations.

mod late_joiners;
pub(super) mod queue;
mod session;
mod state;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use self::late_joiners::LateJoiners;
use self::queue::{Answer, AnswerTarget, BATCH, Op, OpResult, Queue, SqliteRequest, nonsense};
use self::session::Session;
use self::state::{HandleState, LockWaitMark, SPARED};
use super::failure::{busy, not_written, same, unavailable};
use super::file::{Database, FileConnection};
use super::fork_guard::ConnectionSlot;
use super::inline_read::InlineReader;
use super::settings::Synchronous;
use crate::combine::race;
use crate::kit::replays::Replays;
use crate::record::{Lease, Reservation, ReserveRequest};
use crate::store::{Answers, StoreError, StoreErrorKind};

/// Largest number of renewals and late writes that the upkeep thread takes together. The number is high because these
/// operations are small, and because a time limit ends each transaction.
const UPKEEP_BATCH: usize = 8192;
/// Time for which the upkeep thread leaves the lock free between two transactions. A handle that waits for the lock
/// tries at shorter intervals ([`file`](super::file)), so one of its tries finds the lock free.
const TURN: Duration = Duration::from_micros(1500);
/// Largest number of pauses of [`TURN`] in a row while the writer of the same handle still waits.
const TURNS: u32 = 4;
/// Interval at which the reader checks for commits of other handles while duplicates wait. Each waiting duplicate adds
/// [`POLL_FOR_EACH`] to the interval.
const POLL: Duration = Duration::from_millis(5);
const POLL_FOR_EACH: Duration = Duration::from_micros(100);
/// First pause of the upkeep thread between two tries to get the lock; the pause doubles up to [`LONGEST_PAUSE`]. The
/// pauses are short, because another writer may release the lock only briefly.
const FIRST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_micros(500);

/// The choice of the threads that run an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ThreadChoice {
    /// The writer or the reader, for the operations of calls.
    Calls,
    Upkeep,
}

/// The queues and the state of a store handle in one process, which threads and callers share.
pub(super) struct Core {
    pub(super) state: HandleState,
    writes: Queue,
    reads: Queue,
    upkeep: Queue,
    numbers: AtomicU64,
    /// Share of replays among recent reservations. A reservation that changed nothing is counted as a replay.
    replays: Replays,
    inline: InlineReader,
}

/// Opens the file. Creates the file and its table if they are missing.
pub(super) async fn start(database: Database) -> Result<Arc<Core>, StoreError> {
    let core = Arc::new(Core::new(Arc::new(database)));
    let (reply, opened) = oneshot::channel();
    let writer = Arc::clone(&core);
    core.writes.set_started(true);
    spawn("idem-sqlite", move || writer.write(Some(reply)))?;
    opened.await.unwrap_or_else(|_| Err(unavailable("the thread of the store has ended".to_owned())))?;
    Ok(core)
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<(), StoreError> {
    let spawned = thread::Builder::new().name(name.to_owned()).spawn(work);
    spawned.map(drop).map_err(|error| unavailable(format!("no thread can be started: {error}")))
}

/// Ends the queue when its thread ends, so that no caller keeps waiting for that thread.
struct QueueCloser<'a>(&'a Queue);

impl Drop for QueueCloser<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Core {
    pub(super) fn new(database: Arc<Database>) -> Self {
        Self {
            state: HandleState::new(database),
            writes: Queue::default(),
            reads: Queue::default(),
            upkeep: Queue::default(),
            numbers: AtomicU64::new(0),
            replays: Replays::new(),
            inline: InlineReader::new(),
        }
    }

    /// Makes the threads end after they have run all waiting operations.
    pub(super) fn close(&self) {
        [&self.reads, &self.upkeep, &self.writes].into_iter().for_each(Queue::close);
    }

    pub(super) async fn reserve(self: &Arc<Self>, lane: ThreadChoice, request: &ReserveRequest) -> OpResult {
        // While most reservations are replays, the reader (or a lone caller on its own thread) can answer most
        // reservations.
        let reads = lane == ThreadChoice::Calls && self.replays.are_expected();
        if reads && let Some(answer) = self.inline.replay(&self.state.database, request) {
            self.replays.note(1, 1);
            // A task that only replays never waits, so it has to yield to other tasks now and then.
            tokio::task::coop::consume_budget().await;
            return Ok(Answer::Reservation(answer));
        }
        let _counted = reads.then(|| self.inline.count_other());
        let queue = match lane {
            ThreadChoice::Upkeep => &self.upkeep,
            ThreadChoice::Calls if reads => &self.reads,
            ThreadChoice::Calls => &self.writes,
        };
        let began = self.state.database.clock.now();
        let mut answer = self.ask_one(queue, SqliteRequest::Reserve(request.clone(), true), self.limit()).await?;
        if matches!(answer, Answer::Spared) {
            self.state.database.clock.sleep(SPARED).await;
            let left = self.limit().saturating_sub(self.state.database.clock.now().saturating_since(began));
            // Boxed: few reservations pause for another owner's lease, but every reservation would carry the size of
            // this future inline.
            answer = Box::pin(self.ask_one(queue, SqliteRequest::Reserve(request.clone(), false), left)).await?;
        }
        if lane == ThreadChoice::Calls {
            let changed_nothing = !matches!(answer, Answer::Reservation(Reservation::Granted { .. }));
            self.replays.note(usize::from(changed_nothing), 1);
        }
        Ok(answer)
    }

    /// Returns the longest time that a call may take.
    fn limit(&self) -> Duration {
        self.state.database.settings.response_timeout
    }

    pub(super) fn ask(self: &Arc<Self>, lane: ThreadChoice, ask: SqliteRequest) -> impl Future<Output = OpResult> {
        let queue = match lane {
            ThreadChoice::Upkeep => &self.upkeep,
            ThreadChoice::Calls if ask.reads() => &self.reads,
            ThreadChoice::Calls => &self.writes,
        };
        self.ask_one(queue, ask, self.limit())
    }

    /// This is no `async fn`, because an `async fn` stores its argument twice, which enlarges every enclosing future.
    #[expect(clippy::manual_async_fn, reason = "see above")]
    fn ask_one(self: &Arc<Self>, queue: &Queue, ask: SqliteRequest, limit: Duration) -> impl Future<Output = OpResult> {
        async move {
            let (reply, answer) = oneshot::channel();
            let op = self.op(queue, ask, AnswerTarget::One(reply));
            let number = op.number;
            self.push(queue, std::iter::once(op))?;
            // Outside of a Tokio runtime there is no timer, so the answer has no time limit. A caller without a runtime
            // polls this future only once, and that poll has already put the operation into the queue.
            let answered = match Handle::try_current() {
                Ok(_) => race(answer, self.state.database.clock.sleep(limit)).await,
                Err(_) => Some(answer.await),
            };
            match answered {
                Some(Ok(answer)) => answer,
                Some(Err(_)) => Err(unknown("the thread of the store has ended")),
                None if [&self.reads, &self.writes, &self.upkeep].iter().any(|queue| queue.forget(number)) => {
                    Err(unavailable("the file was busy for too long; nothing was written".to_owned()))
                }
                None => Err(unknown("SQLite did not answer in time")),
            }
        }
    }

    /// Renews `leases`. Each renewal is a separate operation, so that its failure affects no other lease.
    pub(super) async fn renew(
        self: &Arc<Self>,
        lane: ThreadChoice,
        leases: &[Lease],
        answer: &Answers<'_>,
    ) -> Result<(), StoreError> {
        let (reply, mut answers) = mpsc::unbounded_channel();
        let queue = if lane == ThreadChoice::Upkeep { &self.upkeep } else { &self.writes };
        let op = |(at, lease): (usize, &Lease)| {
            self.op(queue, SqliteRequest::Renew(lease.clone()), AnswerTarget::Lease(at, reply.clone()))
        };
        self.push(queue, leases.iter().enumerate().map(op))?;
        drop(reply);
        let all = async {
            let (mut answered, mut outcome) = (0, Ok(()));
            while let Some((at, said)) = answers.recv().await {
                answered += 1;
                match said {
                    Ok(Answer::Write(write)) => answer(at, write),
                    Ok(other) => outcome = Err(nonsense(&other)),
                    Err(error) => outcome = Err(error),
                }
            }
            match answered == leases.len() {
                true => outcome,
                false => Err(unknown("the thread of the store has ended")),
            }
        };
        let in_time = race(all, self.state.database.clock.sleep(self.limit())).await;
        in_time.unwrap_or_else(|| Err(unknown("SQLite did not answer in time")))
    }

    fn op(&self, queue: &Queue, ask: SqliteRequest, reply: AnswerTarget) -> Op {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let asked_at = std::ptr::eq(queue, std::ptr::from_ref(&self.upkeep)).then(|| self.state.database.clock.now());
        Op { number, asked_at, ask, reply }
    }

    /// Adds operations to the queue of a thread, and starts the thread if it is not running.
    fn push(self: &Arc<Self>, queue: &Queue, ops: impl ExactSizeIterator<Item = Op>) -> Result<(), StoreError> {
        let is = |other: &Queue| std::ptr::eq(queue, other);
        // The queue of the upkeep thread has no limit: there are only as many leases as running handlers.
        let capacity = if is(&self.upkeep) { usize::MAX } else { self.state.database.settings.queue_capacity };
        if !queue.push(ops, capacity).map_err(|why| unavailable(why.to_owned()))? {
            return Ok(());
        }
        let core = Arc::clone(self);
        let started = match () {
            () if is(&self.writes) => spawn("idem-sqlite", move || core.write(None)),
            () if is(&self.reads) => spawn("idem-sqlite-read", move || core.read()),
            () => spawn("idem-sqlite-keep", move || core.keep_up()),
        };
        started.inspect_err(|_| queue.set_started(false))
    }

    /// Runs the writer. If `opened` is given, first opens or creates the file, and sends the result to `opened`.
    fn write(self: &Arc<Self>, opened: Option<oneshot::Sender<Result<(), StoreError>>>) {
        let _ending = QueueCloser(&self.writes);
        let slot = ConnectionSlot::new();
        if let Some(opened) = opened {
            let created = slot.open(|| self.state.database.create());
            let is_store = created.is_ok();
            if opened.send(created).is_err() || !is_store {
                // The caller is gone, or the file can't be opened.
                self.close();
            }
        }
        let mut batch = Vec::with_capacity(BATCH);
        let mut company = LateJoiners::of(&self.writes);
        while self.writes.take(&mut batch, None) {
            // A commit that does not wait for the disk is cheap, so the writer does not wait for more operations.
            let waits = self.state.database.settings.synchronous == Synchronous::Full;
            while !batch.is_empty() {
                self.on(&slot, Database::reconnect, &mut batch, |session, batch| {
                    while session.write(batch, waits.then_some(&company)) {
                        if waits {
                            company.were_answered(session.done());
                        } else {
                            self.writes.take_more(batch, BATCH);
                        }
                        if batch.is_empty() {
                            return true;
                        }
                        // Further operations of this batch follow on the same connection, so the answers are sent while
                        // the thread still uses the connection.
                        session.send_answers();
                    }
                    false
                });
            }
        }
        slot.close();
    }

    /// Runs the reader.
    fn read(self: &Arc<Self>) {
        let _ending = QueueCloser(&self.reads);
        let slot = ConnectionSlot::new();
        let mut batch = Vec::with_capacity(BATCH);
        let mut version = None;
        while self.reads.take(&mut batch, self.poll()) {
            if batch.len() == 1 && self.replays.are_expected() {
                // The spare connection is opened before the reader answers, because a caller that has its answer may
                // fork.
                self.inline.open(&self.state.database);
            }
            loop {
                let read = |session: &mut Session<'_>, batch: &mut Vec<Op>| {
                    session.read(batch, &mut version, |op| self.hand_on(op))
                };
                if !self.on(&slot, Database::reconnect, &mut batch, read) {
                    version = None;
                    // The woken duplicates ask the store again, and get the error.
                    self.state.waiting.wake_all();
                }
                if batch.is_empty() {
                    break;
                }
            }
        }
        self.inline.close();
        slot.close();
    }

    /// Runs the upkeep thread.
    fn keep_up(self: &Arc<Self>) {
        let _ending = QueueCloser(&self.upkeep);
        let slot = ConnectionSlot::new();
        let mut batch = Vec::with_capacity(BATCH);
        while self.upkeep.take(&mut batch, None) {
            let (mut waits, mut pause) = (None, FIRST_PAUSE);
            self.upkeep.take_more(&mut batch, UPKEEP_BATCH);
            loop {
                let asked = batch.len();
                waits.get_or_insert_with(|| LockWaitMark::upkeep(&self.state));
                let connect = Database::reconnect_for_upkeep;
                let keep_up = |session: &mut Session<'_>, batch: &mut Vec<Op>| session.keep_up(batch);
                self.on(&slot, connect, &mut batch, keep_up);
                if batch.is_empty() && self.upkeep.len() == 0 {
                    break;
                }
                if batch.len() < asked {
                    (waits, pause) = (None, FIRST_PAUSE);
                    // Copies the pages of this transaction from the WAL into the file now: otherwise the next writer
                    // would have to copy them.
                    self.on(&slot, connect, &mut Vec::new(), |session, _| session.checkpoint());
                    self.let_others_write();
                } else {
                    // Another connection holds the lock, so the thread pauses before its next try.
                    thread::park_timeout(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                }
                self.upkeep.take_more(&mut batch, UPKEEP_BATCH);
                self.give_up(&mut batch);
            }
        }
        slot.close();
    }

    /// Leaves the lock free for [`TURN`], so that waiting connections can take it. If the writer of this handle waits,
    /// repeats the pause until the writer has the lock, up to [`TURNS`] times.
    fn let_others_write(&self) {
        for _ in 0..TURNS {
            thread::park_timeout(TURN);
            if !self.state.writer_waits() {
                break;
            }
        }
    }

    /// Fails operations that have waited for too long, and operations whose callers are gone.
    fn give_up(&self, batch: &mut Vec<Op>) {
        let now = self.state.database.clock.now();
        let late = |op: &Op| op.asked_at.is_some_and(|asked_at| now.saturating_since(asked_at) >= self.limit());
        for op in batch.extract_if(.., |op| op.is_abandoned() || late(op)) {
            op.answer(Err(not_written(&busy())));
        }
    }

    /// Runs `work` on the batch and the connection of `slot`. Opens the connection if `slot` has none, and closes a
    /// connection that `work` finds unusable. Returns whether the connection is usable.
    fn on(
        self: &Arc<Self>,
        slot: &Arc<ConnectionSlot>,
        connect: fn(&Database) -> Result<FileConnection, StoreError>,
        batch: &mut Vec<Op>,
        work: impl FnOnce(&mut Session<'_>, &mut Vec<Op>) -> bool,
    ) -> bool {
        if let Err(error) = slot.open(|| connect(&self.state.database)) {
            batch.drain(..).for_each(|op| op.answer(Err(same(&error))));
            return false;
        }
        let mut told = Vec::with_capacity(batch.len());
        let held = slot.lock();
        let healthy =
            held.as_ref().is_some_and(|connected| work(&mut Session::new(&self.state, connected, &mut told), batch));
        drop(held);
        if !healthy {
            slot.close();
        }
        for (reply, answer) in told {
            reply.send(answer);
        }
        healthy
    }

    /// Passes an operation from the reader on to the writer. If the writer has ended, the operation is dropped, which
    /// gives its caller an error.
    fn hand_on(self: &Arc<Self>, op: Op) {
        let _ = self.push(&self.writes, std::iter::once(op));
    }

    /// Returns the interval at which the reader checks for commits of other handles; `None` while no duplicate waits.
    fn poll(&self) -> Option<Duration> {
        match self.state.waiters() {
            0 => None,
            waiters => Some(POLL + POLL_FOR_EACH.saturating_mul(u32::try_from(waiters).unwrap_or(u32::MAX))),
        }
    }
}

fn unknown(message: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Unconfirmed, message)
}
