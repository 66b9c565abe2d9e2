//! The work of one thread on its connection: transactions and their results.

use std::collections::VecDeque;
use std::time::Duration;

use rusqlite::Connection;

use super::super::failure::{breaks_connection, busy, failed, is_busy, not_committed, not_written, same, unconfirmed};
use super::super::file::FileConnection;
use super::super::settings::Synchronous;
use super::super::sql::{Table, Trouble};
use super::late_joiners::LateJoiners;
use super::queue::{Answer, AnswerTarget, BATCH_BYTES, Op, OpResult, SqliteRequest};
use super::state::{HandleState, LockWaitMark, SPARED};
use crate::clock::Instant;
use crate::store::{StoreError, StoreErrorKind};

/// Longest duration of a transaction before its commit: all other writers wait for the lock meanwhile.
const LONGEST_TRANSACTION: Duration = Duration::from_millis(50);
/// Longest duration of a transaction of renewals and late writes, before its commit. This limit is shorter than
/// [`LONGEST_TRANSACTION`], because renewing the leases of thousands of handlers takes many such transactions in a row,
/// between which other writers need the lock. The commit adds the time to write about 2 MB of pages.
const LONGEST_UPKEEP: Duration = Duration::from_millis(8);
/// Number of operations that a transaction runs between two checks of its duration.
const TIMED: usize = 8;
/// Shortest time for which another connection must have held the lock, in milliseconds, so that this store blames the
/// lock for leases that were not renewed.
const LONG_LOCK: i64 = 50;
/// Longest time that a transaction waits, after its batch is done, for the next operations of the callers that were
/// answered last.
const WAIT_FOR_COMPANY: Duration = Duration::from_micros(100);
/// Number of rows that clean-up visits for each reservation. The number is more than one, so that expired rows can't
/// pile up.
const CLEANED_UP: u32 = 2;
/// Number of rows that clean-up visits before an operation that found the file full is retried.
const CLEANED_UP_FOR_ROOM: u32 = 64;
/// Number of tries of an operation that finds the file full.
const ROUNDS_FOR_ROOM: u32 = 16;

/// Reason why a transaction failed.
struct TransactionFailure {
    error: StoreError,
    /// True if the connection is unusable.
    broken: bool,
    /// True if the operations of the transaction may succeed one by one.
    alone: bool,
    /// True if another connection holds the lock, so that no operation was tried.
    busy: bool,
}

impl TransactionFailure {
    fn new(error: StoreError, broken: bool) -> Self {
        Self { error, broken, alone: false, busy: false }
    }

    /// Returns the failure of a transaction that wrote nothing.
    fn nothing_written(error: &rusqlite::Error) -> Self {
        Self { busy: is_busy(error), ..Self::new(not_written(error), breaks_connection(error)) }
    }
}

/// Time at which a transaction first requested the lock, by the wall clock and by the monotonic clock of the handle.
#[derive(Clone, Copy)]
struct LockRequest {
    wall: i64,
    at: Instant,
}

/// Answers that are not sent yet, with their destinations.
pub(super) type PendingAnswers = Vec<(AnswerTarget, OpResult)>;

/// One use of a connection by a thread. No statement outlives that use, because a forked child must be able to close
/// the connection.
pub(super) struct Session<'c> {
    state: &'c HandleState,
    connected: &'c FileConnection,
    table: Table<'c>,
    /// Answers to the operations of the open transaction. The answers are valid only after the commit.
    answers: Vec<OpResult>,
    /// Answers to committed operations. The answers are sent only when the thread no longer uses the connection,
    /// because a caller that has its answer may fork.
    told: &'c mut PendingAnswers,
    /// True if the session waits for the lock, up to the busy timeout.
    patient: bool,
}

impl<'c> Session<'c> {
    pub(super) fn new(state: &'c HandleState, connected: &'c FileConnection, told: &'c mut PendingAnswers) -> Self {
        let table = Table::kept(&connected.connection, &state.database.texts);
        Self { state, connected, table, answers: Vec::new(), told, patient: true }
    }

    fn fail(&mut self, batch: &mut Vec<Op>, error: &StoreError) {
        self.told.extend(batch.drain(..).map(|op| (op.reply, Err(same(error)))));
    }

    fn connection(&self) -> &'c Connection {
        &self.connected.connection
    }

    fn execute(&self, sql: &str) -> rusqlite::Result<()> {
        self.connection().prepare_cached(sql)?.execute([]).map(drop)
    }

    /// Writes the renewals, then the late writes. Renewals are urgent, and need not survive a loss of power, because a
    /// loss of power ends every attempt. If another connection holds the lock, the operations stay in the batch.
    /// Returns false if the connection is unusable.
    pub(super) fn keep_up(&mut self, batch: &mut Vec<Op>) -> bool {
        self.patient = false;
        let mut renewals: Vec<Op> = batch.extract_if(.., |op| matches!(op.ask, SqliteRequest::Renew(_))).collect();
        let healthy = self.write_at(Synchronous::Normal, &mut renewals)
            && self.write_at(self.state.database.settings.synchronous, batch);
        batch.extend(renewals);
        healthy
    }

    /// Copies the WAL into the file. No write waits for the copy. Returns false if the connection is unusable.
    pub(super) fn checkpoint(&self) -> bool {
        if self.connected.files.check().is_err() {
            return false;
        }
        let done = self.connection().query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        done.is_ok() || done.is_err_and(|error| !breaks_connection(&error))
    }

    fn write_at(&mut self, synchronous: Synchronous, batch: &mut Vec<Op>) -> bool {
        if batch.is_empty() {
            return true;
        }
        match self.connected.wait_for_disk(synchronous) {
            Ok(()) => self.write(batch, None),
            Err(error) => {
                self.fail(batch, &not_written(&error));
                false
            }
        }
    }

    /// Runs the batch, and the operations that `company` adds, in one transaction. Operations that don't fit stay in
    /// the batch. Returns false if the connection is unusable.
    pub(super) fn write(&mut self, batch: &mut Vec<Op>, company: Option<&LateJoiners>) -> bool {
        self.answers.clear();
        self.answers.reserve(batch.len());
        match self.transact(batch, true, company) {
            Ok(()) => self.queue_answers(batch),
            Err(TransactionFailure { busy: true, .. }) if !self.patient => {}
            // Neither a failed operation nor a failed clean-up may fail the other operations, so each operation is run
            // alone.
            Err(TransactionFailure { alone: true, broken: false, .. }) => {
                let mut alone = batch.drain(..).collect::<VecDeque<_>>();
                while let Some(op) = alone.pop_front() {
                    if !self.write_alone(op) {
                        batch.extend(alone);
                        return false;
                    }
                }
            }
            Err(TransactionFailure { error, broken, .. }) => {
                self.fail(batch, &error);
                return !broken;
            }
        }
        true
    }

    /// Queues the answers of the committed operations, and wakes the waiting duplicates of their keys.
    fn queue_answers(&mut self, batch: &mut Vec<Op>) {
        if self.state.waiters() > 0 {
            let ended = batch.iter().zip(&self.answers).filter_map(|(op, answer)| op.ask.wakes(answer));
            ended.for_each(|key| self.state.waiting.wake(key.as_str()));
        }
        let done = batch.drain(..self.answers.len());
        self.told.extend(done.map(|op| op.reply).zip(self.answers.drain(..)));
    }

    /// Returns the number of answers that are not sent yet.
    pub(super) fn done(&self) -> usize {
        self.told.len()
    }

    /// Sends the queued answers, although the thread still uses the connection.
    pub(super) fn send_answers(&mut self) {
        for (reply, answer) in self.told.drain(..) {
            reply.send(answer);
        }
    }

    /// Runs one operation in its own transaction. If the file is full, retries after removing expired records.
    fn write_alone(&mut self, op: Op) -> bool {
        let mut batch = vec![op];
        for rounds in (0..ROUNDS_FOR_ROOM).rev() {
            self.answers.clear();
            match self.transact(&mut batch, false, None) {
                Ok(()) => self.queue_answers(&mut batch),
                Err(TransactionFailure { error, broken: false, .. })
                    if rounds > 0 && error.kind() == StoreErrorKind::Full && self.make_room() => {}
                Err(TransactionFailure { error, broken, .. }) => {
                    self.fail(&mut batch, &error);
                    return !broken;
                }
            }
            if batch.is_empty() {
                break;
            }
        }
        true
    }

    /// Removes some expired records. Returns whether a record was removed.
    fn make_room(&mut self) -> bool {
        let database = &self.state.database;
        if database.limit_size(self.connection(), true).is_err() {
            return false;
        }
        let cleaned = self.begin(&mut Vec::new()).and_then(|_| {
            let cleaned = self.table.clean_up(self.state.wall_millis(), CLEANED_UP_FOR_ROOM);
            let removed = cleaned.map_err(|error| TransactionFailure::nothing_written(&error))?;
            self.commit()?;
            Ok(removed)
        });
        if cleaned.is_err() {
            self.roll_back();
        }
        database.limit_size(self.connection(), false).is_ok() && cleaned.is_ok_and(|removed| removed > 0)
    }

    /// Gets the lock, and returns the time of the first request for the lock. While another connection holds the lock,
    /// answers the replays, which need no lock, and drops the operations whose callers are gone.
    fn begin(&mut self, batch: &mut Vec<Op>) -> Result<LockRequest, TransactionFailure> {
        let database = &self.state.database;
        let asked = LockRequest { wall: self.state.wall_millis(), at: database.clock.now() };
        let mut begun = self.try_begin();
        if self.patient && begun.as_ref().is_err_and(is_busy) {
            let now = self.state.wall_millis();
            let mut rest = Vec::with_capacity(batch.len());
            for op in batch.drain(..) {
                match &op.ask {
                    SqliteRequest::Reserve(request, _) => match self.table.answer(request, now) {
                        Ok(Some(answer)) => op.answer(Ok(Answer::Reservation(answer))),
                        _ => rest.push(op),
                    },
                    _ => rest.push(op),
                }
            }
            *batch = rest;
            let _waits = LockWaitMark::writer(self.state);
            begun = database.patiently(|| self.try_begin());
            if begun.as_ref().is_err_and(is_busy) {
                self.state.was_locked_since(self.locked_since(asked), SPARED);
            }
        }
        batch.retain(|op| !op.is_abandoned());
        begun.map_err(|error| TransactionFailure::nothing_written(&error))?;
        // The files are checked under the lock: the index file (`-shm`) may have been removed while the transaction
        // waited, and a lock in a removed index excludes no other process.
        self.connected.files.check().map_err(|error| TransactionFailure::new(error, true))?;
        Ok(asked)
    }

    /// Returns the time since which other connections held the lock, so that this handle could renew no lease.
    fn locked_since(&self, asked: LockRequest) -> i64 {
        self.state.locked_since(asked.at).map_or(asked.wall, |since| since.min(asked.wall))
    }

    fn try_begin(&self) -> rusqlite::Result<()> {
        if self.patient && self.state.upkeep_waits() {
            return Err(busy());
        }
        self.execute("BEGIN IMMEDIATE")?;
        if !self.patient {
            self.state.upkeep_has_lock();
        }
        Ok(())
    }

    fn commit(&self) -> Result<(), TransactionFailure> {
        self.execute("COMMIT").map_err(|error| {
            let rolled_back = self.roll_back();
            let failure = not_committed(&error);
            let alone = failure.kind() == StoreErrorKind::Full;
            TransactionFailure { alone, ..TransactionFailure::new(failure, breaks_connection(&error) || !rolled_back) }
        })?;
        // If the files were replaced during the transaction, another process with the new index may not see this
        // commit.
        self.connected.files.check().map_err(|error| TransactionFailure::new(unconfirmed(&error), true))
    }

    /// Rolls back the open transaction, if there is one. Returns whether no transaction is open afterwards.
    fn roll_back(&self) -> bool {
        self.connection().is_autocommit() || self.connection().execute_batch("ROLLBACK").is_ok()
    }

    /// Runs as many operations of the batch as fit into one transaction, and keeps their answers.
    fn transact(
        &mut self,
        batch: &mut Vec<Op>,
        clean_up: bool,
        company: Option<&LateJoiners>,
    ) -> Result<(), TransactionFailure> {
        let asked = self.begin(batch)?;
        let connection = self.connection();
        let clock = &self.state.database.clock;
        let (began, now) = (clock.now(), self.state.wall_millis());
        let since = self.locked_since(asked).min(now);
        let (mut reservations, mut bytes) = (0, 0);
        let mut patience = WAIT_FOR_COMPANY;
        let longest = if self.patient { LONGEST_TRANSACTION } else { LONGEST_UPKEEP };
        // Runs operations until the batch and its late joiners are done, or the transaction is too long or too large.
        loop {
            let n = self.answers.len();
            if n == batch.len()
                && let Some(company) = company
                && !self.state.upkeep_waits()
            {
                company.join(batch, std::mem::take(&mut patience));
            }
            let Some(op) = batch.get(n) else { break };
            let answer = match self.perform(op, now, since) {
                // A full disk, or a similar error, has rolled back the whole transaction.
                Err(Trouble::Sqlite(error)) if connection.is_autocommit() => {
                    return Err(TransactionFailure {
                        alone: true,
                        busy: false,
                        ..TransactionFailure::nothing_written(&error)
                    });
                }
                answer => answer.map_err(|trouble| failed(&trouble)),
            };
            reservations += u32::from(matches!(op.ask, SqliteRequest::Reserve(..)));
            bytes += answer.as_ref().map_or(0, Answer::bytes);
            self.answers.push(answer);
            let is_long = || clock.now().saturating_since(began) >= longest;
            if bytes >= BATCH_BYTES || ((n + 1).is_multiple_of(TIMED) && is_long()) {
                break;
            }
        }
        // Clean-up in the same transaction costs no further commit. A failure of the clean-up matters only if it has
        // ended the transaction.
        if clean_up
            && let Some(reservations) = self.state.reserved(reservations)
            && let Err(error) = self.table.clean_up(now, CLEANED_UP * reservations)
        {
            tracing::debug!(%error, "expired records could not be cleaned up");
            if connection.is_autocommit() {
                return Err(TransactionFailure {
                    alone: true,
                    busy: false,
                    ..TransactionFailure::nothing_written(&error)
                });
            }
        }
        self.commit()?;
        if self.state.wall_millis() - asked.wall >= LONG_LOCK {
            // The time of this request is noted, not the time of an earlier request, so that the takeover of a lease is
            // postponed only once.
            self.state.was_locked_since(asked.wall, SPARED);
        }
        Ok(())
    }

    /// Runs `op` at `now`. Other connections have held the lock since `since`, so no lease could be renewed.
    fn perform(&mut self, op: &Op, now: i64, since: i64) -> Result<Answer, Trouble> {
        let table = &mut self.table;
        Ok(match &op.ask {
            SqliteRequest::Reserve(request, true)
                if now - since >= LONG_LOCK && table.is_spared(request, since, now)? =>
            {
                Answer::Spared
            }
            SqliteRequest::Reserve(request, _) => Answer::Reservation(table.reserve(request, now)?),
            SqliteRequest::Begin(lease) => Answer::Write(table.begin(lease, now)?),
            SqliteRequest::Renew(lease) => Answer::Write(table.renew(lease, now)?),
            SqliteRequest::Finish(..) | SqliteRequest::Append(..) if !self.state.database.holds(op.ask.bytes()) => {
                return Err(Trouble::TooLarge(op.ask.bytes()));
            }
            SqliteRequest::Append(lease, journal) => Answer::Write(table.append(lease, journal, now)?),
            SqliteRequest::Finish(lease, finish) => Answer::Write(table.finish(lease, finish, now)?),
            SqliteRequest::Release(lease, release) => Answer::Write(table.release(lease, *release, now)?),
            SqliteRequest::Decide(decision) => Answer::Decided(table.decide(decision, now)?),
            SqliteRequest::Purge(limit) => Answer::Removed(table.clean_up(now, *limit)?),
            SqliteRequest::Inspect(key) => Answer::Inspection(table.inspect(key, now)?),
            SqliteRequest::List(filter) => Answer::Page(table.list(filter, now)?),
            SqliteRequest::Ping => table.ping().map(|()| Answer::Pong)?,
        })
    }

    /// Answers the operations that change nothing. Passes an operation that has to write to `hand_on` immediately, so
    /// that the writer does not wait for the whole batch. Returns false if the connection is unusable. `version` is the
    /// file's version at the last wake-up of waiting duplicates.
    pub(super) fn read(&mut self, batch: &mut Vec<Op>, version: &mut Option<i64>, hand_on: impl FnMut(Op)) -> bool {
        let looked = self.look(batch, version, hand_on);
        let Err(failure) = looked else { return true };
        self.roll_back();
        self.fail(batch, &failure.error);
        !failure.broken
    }

    /// Reads from one snapshot, for at most [`LONGEST_TRANSACTION`]: while a snapshot is in use, SQLite can't reuse the
    /// WAL from its beginning.
    fn look(
        &mut self,
        batch: &mut Vec<Op>,
        version: &mut Option<i64>,
        mut hand_on: impl FnMut(Op),
    ) -> Result<(), TransactionFailure> {
        let state = self.state;
        let database = &state.database;
        self.connected.files.check().map_err(|error| TransactionFailure::new(error, true))?;
        let failed_to_read = |error: rusqlite::Error| TransactionFailure::nothing_written(&error);
        // Several reads share one snapshot, in a transaction; a lone read needs no explicit transaction.
        let polls = state.waiters() > 0;
        let transaction = batch.len() + usize::from(polls) > 1;
        let began = database.clock.now();
        if transaction {
            self.execute("BEGIN").map_err(failed_to_read)?;
        }
        if polls {
            let found = database
                .patiently(|| self.connection().prepare_cached("PRAGMA data_version")?.query_row([], |row| row.get(0)));
            let found = found.map_err(failed_to_read)?;
            // The version is read before the records of this batch, so that the next poll notices a commit that follows
            // these reads.
            if version.replace(found) != Some(found) {
                state.waiting.wake_all();
            }
        }
        let (now, mut bytes) = (self.state.wall_millis(), 0);
        // The batch is reversed because operations are popped from its end. Operations that are not run stay in the
        // batch.
        batch.reverse();
        for n in 0_usize.. {
            let Some(op) = batch.pop() else { break };
            let answer = database.patiently(|| match &op.ask {
                SqliteRequest::Reserve(request, _) => {
                    quietly(self.table.answer(request, now).map(|it| it.map(Answer::Reservation)))
                }
                SqliteRequest::Inspect(_) | SqliteRequest::List(_) | SqliteRequest::Ping => {
                    quietly(self.perform(&op, now, now).map(Some))
                }
                _ => Ok(Ok(None)),
            });
            match answer.map_err(Trouble::Sqlite).and_then(|answer| answer) {
                Err(Trouble::Sqlite(error)) if breaks_connection(&error) => {
                    batch.push(op);
                    return Err(failed_to_read(error));
                }
                answer => match answer.map_err(|trouble| failed(&trouble)).transpose() {
                    Some(answer) => {
                        bytes += answer.as_ref().map_or(0, Answer::bytes);
                        self.told.push((op.reply, answer));
                    }
                    None => hand_on(op),
                },
            }
            let is_long = || database.clock.now().saturating_since(began) >= LONGEST_TRANSACTION;
            if bytes >= BATCH_BYTES || ((n + 1).is_multiple_of(TIMED) && is_long()) {
                break;
            }
        }
        batch.reverse();
        if transaction { self.execute("COMMIT").map_err(failed_to_read) } else { Ok(()) }
    }
}

/// Separates the errors of SQLite from other errors, because `patiently` retries only errors of SQLite.
fn quietly<T>(answer: Result<T, Trouble>) -> rusqlite::Result<Result<T, Trouble>> {
    match answer {
        Err(Trouble::Sqlite(error)) => Err(error),
        answer => Ok(answer),
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use tokio::sync::oneshot;

    use super::super::super::file::Database;
    use super::super::super::settings::SqliteSettings;
    use super::super::queue::Queue;
    use super::*;
    use crate::clock::SystemClock;
    use crate::codec::CodecName;
    use crate::key::Key;
    use crate::record::{Finish, OwnerToken, Reservation, ReserveRequest, StoredResult, Verdict};

    /// A store without threads, on a file in a folder that `drop` removes.
    struct ThreadlessStore {
        folder: PathBuf,
        state: HandleState,
        connected: FileConnection,
    }

    impl ThreadlessStore {
        fn new(name: &str) -> Self {
            let folder = std::env::temp_dir().join(format!("idem-sqlite-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&folder).unwrap();
            let settings = SqliteSettings { busy_timeout: Duration::from_millis(1), ..SqliteSettings::default() };
            let clock = Arc::new(SystemClock::default());
            let database = Database::new(&folder.join("records.db"), settings, clock).unwrap();
            let state = HandleState::new(Arc::new(database));
            let connected = state.database.create().unwrap();
            Self { folder, state, connected }
        }

        /// Runs `work` on the operations `asks`. Returns the number of operations that were not run, and the answers.
        fn work(
            &self,
            asks: Vec<SqliteRequest>,
            work: impl FnOnce(&mut Session<'_>, &mut Vec<Op>),
        ) -> (usize, Vec<OpResult>) {
            let mut callers = Vec::new();
            let op = |ask| {
                let (reply, caller) = oneshot::channel();
                callers.push(caller);
                Op { number: 0, asked_at: None, ask, reply: AnswerTarget::One(reply) }
            };
            let mut batch: Vec<_> = asks.into_iter().map(op).collect();
            let mut told = Vec::new();
            work(&mut Session::new(&self.state, &self.connected, &mut told), &mut batch);
            (batch.len(), told.into_iter().map(|(_, answer)| answer).collect())
        }
    }

    impl Drop for ThreadlessStore {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.folder).ok();
        }
    }

    fn reserve(n: u8) -> ReserveRequest {
        let (key, owner) = (Key::new("threads", n).unwrap(), OwnerToken::from_bytes([n; 16]));
        ReserveRequest::new(key, owner, Duration::from_secs(60), Duration::from_secs(60))
    }

    #[test]
    fn a_transaction_takes_no_more_than_some_megabytes_of_answers() {
        let quiet = ThreadlessStore::new("answers");
        let requests: Vec<_> = (0..32).map(reserve).collect();
        for request in &requests {
            let lease = crate::record::Record::first(request).lease(request);
            let bytes = vec![b'x'; 1024 * 1024].into();
            let result =
                Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<crate::codec::Json>(), bytes });
            let asks = vec![SqliteRequest::Reserve(request.clone(), true), SqliteRequest::Finish(lease, result)];
            let (left, answers) = quiet.work(asks, |session, batch| assert!(session.write(batch, None)));
            assert!(left == 0 && answers.iter().all(Result::is_ok), "{answers:?}");
        }
        // The 32 results together exceed `BATCH_BYTES`. So one transaction returns only some of them, whether it writes
        // or only reads.
        let asks = || requests.iter().cloned().map(|request| SqliteRequest::Reserve(request, true)).collect::<Vec<_>>();
        let (left, answers) = quiet.work(asks(), |session, batch| assert!(session.write(batch, None)));
        assert!(answers.len() <= 4 && left == requests.len() - answers.len(), "{left} left");
        let mut version = None;
        let (left, answers) =
            quiet.work(asks(), |session, batch| assert!(session.read(batch, &mut version, |_| panic!("a replay"))));
        assert!(answers.len() <= 4 && left == requests.len() - answers.len(), "{left} left");
    }

    #[test]
    fn a_transaction_includes_operations_that_arrive_before_its_commit() {
        let quiet = ThreadlessStore::new("company");
        let queue = Queue::default();
        let mut company = LateJoiners::of(&queue);
        let mut keys = 0_u8;
        let mut asks = |count: u8| {
            keys += count;
            (keys - count..keys).map(|n| SqliteRequest::Reserve(reserve(n), true)).collect::<Vec<_>>()
        };
        let come = |asks: Vec<SqliteRequest>| {
            let op = |ask| Op { number: 0, asked_at: None, ask, reply: AnswerTarget::One(oneshot::channel().0) };
            queue.push(asks.into_iter().map(op).collect::<Vec<_>>().into_iter(), 100).unwrap();
        };
        let answered = |asks, company: &LateJoiners<'_>| {
            quiet.work(asks, |session, batch| assert!(session.write(batch, Some(company)))).1.len()
        };
        // No caller was answered before, so the transaction waits for no caller.
        assert_eq!(answered(asks(1), &company), 1);
        company.were_answered(4);
        let leases = (0..3).map(|n| {
            let request = reserve(100 + n);
            SqliteRequest::Finish(
                crate::record::Record::first(&request).lease(&request),
                Finish::Completed(StoredResult::Unencodable),
            )
        });
        come(leases.collect());
        assert_eq!(answered(asks(1), &company), 4);
    }

    #[test]
    fn the_writer_thread_lets_the_upkeep_thread_take_the_lock_first() {
        let quiet = ThreadlessStore::new("first");
        let waits = LockWaitMark::upkeep(&quiet.state);
        let asks = || vec![SqliteRequest::Reserve(reserve(1), true)];
        let (_, answers) = quiet.work(asks(), |session, batch| assert!(session.write(batch, None)));
        assert!(matches!(&answers[..], [Err(error)] if error.kind() == StoreErrorKind::Unavailable), "{answers:?}");
        let (left, answers) = quiet.work(asks(), |session, batch| assert!(session.keep_up(batch)));
        assert!(left == 0 && matches!(answers[..], [Ok(Answer::Reservation(_))]), "{answers:?}");
        drop(waits);
        let (_, answers) = quiet.work(asks(), |session, batch| assert!(session.write(batch, None)));
        assert!(matches!(answers[..], [Ok(Answer::Reservation(_))]), "{answers:?}");
    }

    #[test]
    fn a_lease_that_lapsed_while_the_file_was_locked_is_not_taken_over_for_a_moment() {
        const LONG: Duration = Duration::from_secs(600);
        let quiet = ThreadlessStore::new("spared");
        let held = ReserveRequest { lease: Duration::from_millis(1), ..reserve(1) };
        let before = quiet.state.wall_millis();
        let write = |session: &mut Session<'_>, batch: &mut Vec<Op>| assert!(session.write(batch, None));
        quiet.work(vec![SqliteRequest::Reserve(held.clone(), true)], write);
        while quiet.state.wall_millis() <= before + LONG_LOCK {
            std::thread::yield_now();
        }
        let duplicate = ReserveRequest { owner: OwnerToken::from_bytes([9; 16]), ..held.clone() };
        let ask = |spares| vec![SqliteRequest::Reserve(duplicate.clone(), spares)];
        // Another connection held the lock from before the lapse until now.
        quiet.state.was_locked_since(before, LONG);
        let (_, answers) = quiet.work(ask(true), write);
        assert!(matches!(answers[..], [Ok(Answer::Spared)]), "{answers:?}");
        // The owner of the lease repeats its reservation, and gets its lease again.
        let (_, answers) = quiet.work(vec![SqliteRequest::Reserve(held.clone(), true)], write);
        assert!(matches!(answers[..], [Ok(Answer::Reservation(Reservation::Granted { takeover: false, .. }))]));
        // After the pause, a reservation takes the lease over.
        let taken_over = |answers: &[OpResult]| {
            matches!(answers, [Ok(Answer::Reservation(Reservation::Granted { takeover: true, .. }))])
        };
        let (_, answers) = quiet.work(ask(false), write);
        assert!(taken_over(&answers), "{answers:?}");
        // The lock was held for long, but only after the lease had lapsed. So the lock was not the reason for the
        // lapse, and the lease is taken over.
        let pass = |millis| {
            let until = quiet.state.wall_millis() + millis;
            while quiet.state.wall_millis() <= until {
                std::thread::yield_now();
            }
        };
        pass(10);
        let since = quiet.state.wall_millis();
        pass(LONG_LOCK);
        quiet.state.was_locked_since(since, LONG);
        let third = ReserveRequest { owner: OwnerToken::from_bytes([7; 16]), ..held };
        let (_, answers) = quiet.work(vec![SqliteRequest::Reserve(third, true)], write);
        assert!(taken_over(&answers), "{answers:?}");
    }

    #[test]
    fn a_lock_held_by_another_connection_is_noted_from_the_first_try_on() {
        let quiet = ThreadlessStore::new("noted");
        let state = &quiet.state;
        let at = state.database.clock.now();
        let holder = state.database.reconnect().unwrap();
        holder.connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        let write = |session: &mut Session<'_>, batch: &mut Vec<Op>| assert!(session.write(batch, None));
        let (before, asks) = (quiet.state.wall_millis(), || vec![SqliteRequest::Reserve(reserve(1), true)]);
        assert!(matches!(quiet.work(asks(), write).1[..], [Err(_)]));
        let since = state.locked_since(at).expect("noted");
        assert!((before..=quiet.state.wall_millis()).contains(&since));
        // A second try soon after the first keeps the time of the first try.
        state.was_locked_since(since, Duration::from_secs(600));
        assert!(matches!(quiet.work(asks(), write).1[..], [Err(_)]));
        assert_eq!(state.locked_since(at), Some(since));
    }

    #[test]
    fn only_renewals_do_not_wait_for_the_disk() {
        let quiet = ThreadlessStore::new("disk");
        let request = reserve(1);
        let lease = crate::record::Record::first(&request).lease(&request);
        let asks = vec![
            SqliteRequest::Renew(lease.clone()),
            SqliteRequest::Reserve(request, true),
            SqliteRequest::Renew(lease.clone()),
        ];
        let (_, answers) = quiet.work(asks, |session, batch| {
            assert!(session.keep_up(batch));
            assert_eq!(session.connected.synchronous(), 2, "FULL again, for what has to last");
        });
        let kinds: Vec<_> =
            answers.iter().map(|answer| matches!(answer, Ok(Answer::Write(Verdict::Refused)))).collect();
        assert_eq!(kinds, [true, true, false], "renewals come first: {answers:?}");
        quiet.work(vec![SqliteRequest::Renew(lease)], |session, batch| {
            assert!(session.keep_up(batch));
            assert_eq!(session.connected.synchronous(), 1, "NORMAL");
        });
    }
}
