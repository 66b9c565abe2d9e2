//! Records inside the user's transaction: the operations of a store on the connection of any driver.
//!
//! Every statement is a text that contains its values, as hexadecimal digits: a prepared statement would take one more
//! exchange. A failed statement leaves the transaction open, with two exceptions: after a deadlock the server rolls
//! back the whole transaction, and a statement such as `CREATE TABLE` commits it. Later statements then commit one by
//! one. The savepoints show this: they end with their transaction.

use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::MutexGuard;

use super::failure::{meaning, shown};
use super::locked_or_changing;
use super::sql::{self, DecisionWrite, Param, Row, SizeLimit, Statement, Statements};
use crate::clock::Clock;
use crate::key::Key;
use crate::kit::held::{MEETINGS, held_by_another};
use crate::kit::looks::{LOOKS, pause_before};
use crate::kit::rows::{AdmissionOutcome, FoundRow, corrupt};
use crate::kit::tables::{NamedTable, RecentTables};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Lease, ReadExtent, Record, Release, Reservation, ReserveRequest,
    State, StoredResult, Verdict,
};
use crate::store::transaction::{
    DriverTransaction, ExchangeGuard, Sealed, SharedTransaction, TransactionStore, can_not_continue,
};
use crate::store::{StoreError, StoreErrorKind};

/// Pause between two reservations of a duplicate that waits. The reservation itself waits for a second.
const POLL: Duration = Duration::from_millis(50);
/// Size of a record, in bytes, from which the limit of the server is read first: a larger message would end the
/// connection.
const LARGE: usize = 256 * 1024;

/// Limits the wait of the following statement for a lock on a row or on the table to one second. MariaDB runs the
/// comments that begin with `M!`, and has limits for one statement. MySQL runs the others, and has only limits of the
/// session, which [`RESTORE`] sets back.
const LIMIT: &str = "/*!80000 SET @idem_lock_wait = @@SESSION.innodb_lock_wait_timeout, \
                     @idem_table_wait = @@SESSION.lock_wait_timeout, SESSION innodb_lock_wait_timeout = 1, \
                     SESSION lock_wait_timeout = 1 */ /*M! DO 0 */; \
                     /*M! SET STATEMENT innodb_lock_wait_timeout = 1, lock_wait_timeout = 1 FOR */ ";
/// Ends the effect of [`LIMIT`].
const RESTORE: &str = "/*!80000 SET SESSION innodb_lock_wait_timeout = @idem_lock_wait, \
                       SESSION lock_wait_timeout = @idem_table_wait */ /*M! DO 0 */";
/// Savepoint at the start of a transaction that the library begins.
const WITNESS: &str = "idem_transaction";

/// The tables of records.
static TABLES: RecentTables<Statements> = RecentTables::empty();

fn table_of(name: &str) -> Arc<NamedTable<Statements>> {
    TABLES.of(name, Statements::new)
}

/// An open transaction; see [`MySqlStore::within`](super::MySqlStore::within).
pub struct InMySql<'a, T> {
    shared: &'a MySqlTransaction<T>,
    table: Arc<NamedTable<Statements>>,
    clock: &'a dyn Clock,
}

/// An open transaction of a driver, for [`MySqlStore::within`](super::MySqlStore::within): the `Transaction` of
/// `mysql_async` 0.37, or of sqlx 0.8 or 0.9. Each driver has its own feature, for example `with-sqlx-0_9`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a transaction of MySQL that `MySqlStore` can use",
    label = "not the transaction of a driver for MySQL"
)]
pub trait Transaction: DriverTransaction<Shared = MySqlTransaction<Self>> {
    /// Runs statements that contain their values. Returns the rows of all of them.
    #[doc(hidden)]
    fn run(&mut self, text: &str) -> impl Future<Output = Result<Vec<Row>, StatementError>>;
}

/// A transaction that the user shares with the library. Derefs to its lock.
#[derive(Debug)]
pub struct MySqlTransaction<T> {
    shared: SharedTransaction<T>,
    /// Number of open savepoints of calls.
    savepoints: AtomicUsize,
    /// True once an error has shown that the server ended the transaction.
    has_ended: AtomicBool,
}

impl<T> MySqlTransaction<T> {
    pub(super) fn into_inner(self) -> T {
        self.shared.into_inner()
    }
}

impl<T> Deref for MySqlTransaction<T> {
    type Target = SharedTransaction<T>;

    fn deref(&self) -> &SharedTransaction<T> {
        &self.shared
    }
}

impl<T> From<T> for MySqlTransaction<T> {
    fn from(transaction: T) -> Self {
        Self { shared: transaction.into(), savepoints: AtomicUsize::new(0), has_ended: AtomicBool::new(false) }
    }
}

/// Marks the start of a transaction, for [`is_intact`].
pub(crate) async fn mark_start<T: Transaction>(transaction: &mut T) -> Result<(), StatementError> {
    transaction.run(&format!("SAVEPOINT {WITNESS}")).await.map(drop)
}

/// Returns whether the transaction may be committed: it is the transaction that [`mark_start`] marked, and the answers
/// of its connection belong to the statements.
///
/// # Errors
/// If the server has ended the transaction.
pub(crate) async fn is_intact<T: Transaction>(transaction: &mut T) -> Result<bool, StatementError> {
    // A driver that lost its place in the protocol returns the answer to an earlier statement, which may have come from
    // another transaction.
    static CHECKS: AtomicUsize = AtomicUsize::new(1);
    let number = i64::try_from(CHECKS.fetch_add(1, Ordering::Relaxed)).unwrap_or(0);
    let rows = transaction.run(&format!("RELEASE SAVEPOINT {WITNESS}; SELECT {number}")).await?;
    Ok(matches!(&rows[..], [row] if row.int(0) == Ok(Some(number))))
}

/// An error of the server or the driver for a statement.
#[derive(Debug)]
pub struct StatementError {
    /// Number of the error, if the server answered.
    pub(super) code: Option<u16>,
    /// Text of the error, without values.
    pub(super) message: String,
}

impl StatementError {
    pub(super) fn refused(code: u16, message: &str) -> Self {
        Self { code: Some(code), message: shown(code, message).to_owned() }
    }

    pub(super) fn failed(message: impl Into<String>) -> Self {
        Self { code: None, message: message.into() }
    }

    /// Returns whether another transaction has locked the row.
    fn is_locked(&self) -> bool {
        matches!(self.code, Some(1205 | 3572))
    }

    /// Returns whether the record of an insert exists.
    fn is_duplicate(&self) -> bool {
        self.code == Some(1062)
    }

    /// Returns whether the transaction has ended: by a deadlock, or its savepoint has disappeared.
    fn shows_the_end(&self) -> bool {
        matches!(self.code, Some(1213 | NO_SAVEPOINT))
    }
}

/// Number of the error for a savepoint that does not exist.
const NO_SAVEPOINT: u16 = 1305;

/// Returns whether the server aborted a transaction because of a conflict with another transaction. The whole
/// transaction may be retried.
pub(crate) fn is_conflict(code: u16) -> bool {
    matches!(code, 1213 | 1020 | 3101)
}

impl From<StatementError> for StoreError {
    fn from(refused: StatementError) -> Self {
        let StatementError { code, message } = refused;
        let conflicts = code.is_some_and(is_conflict);
        let (kind, advice) = match code {
            Some(NO_SAVEPOINT) => (
                StoreErrorKind::Aborted,
                "the server has ended it, after a deadlock or by a statement that commits, such as `CREATE TABLE`",
            ),
            Some(code) => meaning(code),
            None => (StoreErrorKind::Aborted, "its connection failed"),
        };
        can_not_continue(kind, advice, code, &message, conflicts)
    }
}

impl<'a, T> InMySql<'a, T> {
    pub(crate) fn new(shared: &'a MySqlTransaction<T>, clock: &'a dyn Clock) -> Self {
        Self { shared, table: table_of(sql::TABLE), clock }
    }

    pub(crate) fn table(mut self, table: &str) -> Self {
        self.table = table_of(table);
        self
    }
}

impl<T> Clone for InMySql<'_, T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared, table: Arc::clone(&self.table), clock: self.clock }
    }
}

impl<T> fmt::Debug for InMySql<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InMySql").field("table", &self.table.name).finish_non_exhaustive()
    }
}

/// Returns the text of a statement with its values.
fn filled(statement: &Statement, params: &[Param]) -> String {
    let (count, params) = statement.params(&[params.to_vec()]);
    sql::inline(&statement.text(count), &params)
}

impl<T: Transaction> InMySql<'_, T> {
    /// Locks the transaction, unless the server has ended it: later statements would commit one by one.
    async fn lock(&self) -> Result<MutexGuard<'_, T>, StatementError> {
        let locked = self.shared.lock_for_statement(self.clock).await.map_err(StatementError::failed)?;
        match self.shared.has_ended.load(Ordering::Relaxed) {
            true => Err(StatementError::refused(NO_SAVEPOINT, "an earlier statement showed it")),
            false => Ok(locked),
        }
    }

    /// Notes the end of the transaction, if `done` shows it.
    fn noted<R>(&self, done: Result<R, StatementError>) -> Result<R, StatementError> {
        done.inspect_err(|error| {
            if error.shows_the_end() {
                self.shared.has_ended.store(true, Ordering::Relaxed);
            }
        })
    }

    /// Runs statements that contain their values. Returns the rows of all of them.
    async fn run(&self, text: &str) -> Result<Vec<Row>, StatementError> {
        let mut transaction = self.lock().await?;
        // After an exchange that was dropped halfway, the user's next statement would get its answer.
        let exchange = ExchangeGuard::of(self.shared);
        let done = transaction.run(text).await;
        exchange.end();
        self.noted(done)
    }

    /// Runs a statement whose wait for locks is limited to a second.
    async fn run_limited(&self, text: &str) -> Result<Vec<Row>, StatementError> {
        let mut transaction = self.lock().await?;
        let exchange = ExchangeGuard::of(self.shared);
        let done = transaction.run(&format!("{LIMIT}{text}; {RESTORE}")).await;
        // The server runs no statement after one that fails. The limits outlive a transaction that it has ended.
        if matches!(&done, Err(error) if error.code.is_some()) {
            transaction.run(RESTORE).await?;
        }
        exchange.end();
        self.noted(done)
    }

    /// Runs a statement that writes one record. Returns whether it was written.
    async fn writes(&self, statement: &Statement, params: &[Param]) -> Result<bool, StatementError> {
        let rows = self.run_limited(&format!("{}; SELECT ROW_COUNT()", filled(statement, params))).await?;
        let count = rows.first().and_then(|row| row.int(0).ok().flatten());
        count.map(|count| count > 0).ok_or_else(|| StatementError::failed("the server did not count the rows"))
    }

    /// Returns the row of `key`. The row of a plain statement is the one that the transaction sees; `look_held` returns
    /// the latest one.
    async fn row(&self, look: &Statement, key: &Key) -> Result<Option<Row>, StatementError> {
        Ok(self.run(&filled(look, &[key.as_str().into()])).await?.pop())
    }

    /// Returns the latest row of `key`, and holds it until the transaction ends.
    async fn row_held(&self, key: &Key) -> Result<Option<Row>, StatementError> {
        Ok(self.run_limited(&filled(&self.table.statements.look_held, &[key.as_str().into()])).await?.pop())
    }

    /// Answers a request for a key that another transaction holds. Only a read that locks the row may answer it: any
    /// other read may show a result that is not committed, or one that an operator has forgotten since.
    async fn answer_held(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let look = filled(&self.table.statements.look_free, &[request.key.as_str().into()]);
        let attempt = match self.run_limited(&look).await.map(|mut rows| rows.pop()) {
            Ok(Some(row)) => match sql::found(&row, ReadExtent::Whole).map_err(corrupt)?.meet(request) {
                AdmissionOutcome::Answer(answer) => return Ok(answer),
                AdmissionOutcome::Replace { with, .. } => with.attempt,
            },
            Ok(None) => 1,
            Err(refused) if refused.is_locked() => 1,
            Err(refused) => return Err(refused.into()),
        };
        Ok(held_by_another(&request.key, attempt))
    }

    /// Reads a record.
    fn record(row: Option<Row>) -> Result<Option<FoundRow>, StoreError> {
        row.map(|row| sql::found(&row, ReadExtent::Whole).map_err(corrupt)).transpose()
    }

    /// Returns the limit of the size of a record with `bytes`. Asks the server only about a large one.
    async fn size_limit(&self, bytes: usize) -> Result<SizeLimit, StoreError> {
        if bytes < LARGE {
            return Ok(SizeLimit(usize::MAX));
        }
        let rows = self.run("SELECT @@max_allowed_packet").await?;
        let most = rows.first().and_then(|row| row.int(0).ok().flatten());
        let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
        // The text of the statement has two digits for each byte.
        Ok(SizeLimit(most / 2))
    }

    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Verdict, StoreError> {
        let record = Record::after(lease, state);
        let params = sql::end(lease.key.as_str(), &record, refund, lease.ttl);
        if self.writes(&self.table.statements.end, &params).await? {
            return Ok(Verdict::Applied);
        }
        let found = Self::record(self.row_held(&lease.key).await?)?.filter(|found| !found.is_expired());
        Ok(found.map_or(Verdict::Refused, |found| found.record.ended(lease, record.is_finished())))
    }

    /// Applies an operator's decision to the record of its key. Returns `None` if the record has changed meanwhile.
    async fn try_decide(&self, decision: &Decision) -> Result<Option<DecisionAnswer>, StoreError> {
        let row = self.row_held(&decision.key).await?;
        let DecisionWrite { statement, params, .. } = match self.table.statements.write_of(decision, row.as_ref()) {
            Ok(write) => write,
            Err(answer) => return Ok(Some(answer)),
        };
        let is_written = self.writes(statement, &params).await?;
        Ok(is_written.then_some(DecisionAnswer::Applied))
    }

    /// Returns the number of open savepoints of calls.
    fn depth(&self) -> usize {
        self.shared.savepoints.load(Ordering::Relaxed)
    }

    fn close_savepoint(&self) {
        self.shared.savepoints.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<T> Sealed for InMySql<'_, T> {}

impl<T: Transaction> TransactionStore for InMySql<'_, T> {
    const NAME: &'static str = "mysql";

    fn place(&self) -> &str {
        &self.table.name
    }

    async fn save(&self) -> Result<(), StoreError> {
        let number = self.depth() + 1;
        // Outside of a transaction the second statement fails.
        self.run(&format!("SAVEPOINT idem_{number}; ROLLBACK TO SAVEPOINT idem_{number}")).await?;
        self.shared.savepoints.store(number, Ordering::Relaxed);
        Ok(())
    }

    async fn rewind(&self) -> Result<(), StoreError> {
        self.run(&format!("ROLLBACK TO SAVEPOINT idem_{}", self.depth())).await?;
        Ok(())
    }

    /// Calls `begun` after the release: if the release is dropped halfway, the transaction is doomed.
    async fn keep(&self, begun: impl FnOnce()) -> Result<(), StoreError> {
        self.run(&format!("RELEASE SAVEPOINT idem_{}", self.depth())).await?;
        self.close_savepoint();
        begun();
        Ok(())
    }

    async fn undo(&self) -> Result<(), StoreError> {
        let number = self.depth();
        self.run(&format!("ROLLBACK TO SAVEPOINT idem_{number}; RELEASE SAVEPOINT idem_{number}")).await?;
        self.close_savepoint();
        Ok(())
    }

    /// Dooms the transaction. No driver can undo in a `drop` without risk: after an exchange that was dropped halfway,
    /// the driver takes the rest of its answer for the answer to the next statement.
    fn undo_immediately(&self) {
        self.close_savepoint();
        self.shared.doom();
    }

    async fn reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        let statements = &self.table.statements;
        for look in 0..LOOKS {
            pause_before(look, self.clock).await;
            match self.run_limited(&filled(&statements.reserve, &sql::reserve(request))).await {
                Ok(_) => {
                    MEETINGS.forget(request.key.seed());
                    return Ok(Record::first(request).grant(request, false));
                }
                Err(refused) if refused.is_duplicate() => {}
                Err(refused) if refused.is_locked() => return self.answer_held(request).await,
                Err(refused) => return Err(refused.into()),
            }
            // The failed insert holds the row against writes, so that this read waits for no other transaction.
            let found = match self.row_held(&request.key).await {
                Ok(row) => Self::record(row)?,
                Err(refused) if refused.is_locked() => return self.answer_held(request).await,
                Err(refused) => return Err(refused.into()),
            };
            MEETINGS.forget(request.key.seed());
            let Some(found) = found else { continue };
            let (met, with, takeover) = match found.meet(request) {
                AdmissionOutcome::Answer(answer) => return Ok(answer),
                AdmissionOutcome::Replace { met, with, takeover } => (met, with, takeover),
            };
            match self.writes(&statements.replace, &sql::replace(request, &met, &with)).await {
                Ok(true) => return Ok(with.grant(request, takeover)),
                Ok(false) => {}
                Err(refused) if refused.is_locked() => return Ok(held_by_another(&request.key, with.attempt)),
                Err(refused) => return Err(refused.into()),
            }
        }
        Err(locked_or_changing(StoreErrorKind::Aborted))
    }

    async fn begin(&self, lease: &Lease) -> Result<Verdict, StoreError> {
        let is_marked = self.writes(&self.table.statements.begin, &sql::attempt(lease)).await?;
        Ok(if is_marked { Verdict::Applied } else { Verdict::Refused })
    }

    async fn finish(&self, lease: &Lease, finish: &Finish) -> Result<Verdict, StoreError> {
        let result = finish.result();
        self.size_limit(result.stored_bytes()).await?.check_result(result)?;
        self.end(lease, finish.state(), 0).await
    }

    async fn release(&self, lease: &Lease, release: Release) -> Result<Verdict, StoreError> {
        self.end(lease, release.state(), i64::from(!release.counts())).await
    }

    /// Waits for [`POLL`]. The next reservation waits for a second, and is woken by the end of the other transaction. A
    /// read that waits would lock the gap of a key that has no row.
    async fn wait(&self, _: &Key, at_most: Duration) -> Result<bool, StoreError> {
        self.clock.sleep(at_most.min(POLL)).await;
        Ok(true)
    }

    /// Returns the record that the transaction sees.
    async fn inspect(&self, key: &Key) -> Result<Option<Inspection>, StoreError> {
        let row = self.row(&self.table.statements.look, key).await?;
        Ok(row.and_then(|row| sql::examine(&row)).map(|examined| examined.inspection))
    }

    async fn decide(&self, decision: &Decision) -> Result<DecisionAnswer, StoreError> {
        let bytes = decision.result().map_or(0, StoredResult::stored_bytes);
        self.size_limit(bytes).await?.check_decision(decision)?;
        for look in 0..LOOKS {
            pause_before(look, self.clock).await;
            if let Some(decided) = self.try_decide(decision).await? {
                return Ok(decided);
            }
        }
        Err(locked_or_changing(StoreErrorKind::Aborted))
    }
}
