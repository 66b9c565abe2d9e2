//! Records in a table of a MySQL or MariaDB server.
//!
//! A record is one row. An insert that changes nothing if the key exists reserves the key; MariaDB returns the row of
//! the key with the same statement, and MySQL with a second one. Every change of a row by an attempt is one `UPDATE`
//! that compares the owner token, and every time is the server's. The store holds no transaction open while a handler
//! runs.

mod batch;
mod client;
mod failure;
mod options;
mod sql;
mod statement_pool;
mod wake;
#[cfg(feature = "with-mysql_async-0_37")]
mod with_mysql_async;
pub(crate) mod within;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use mysql_async::Opts;
use tokio::sync::oneshot;

use self::batch::{BeginMarks, EndWrites, JournalWrites, LookupResult, Reservations};
use self::client::MySqlPool;
use self::failure::OpFailure;
pub use self::options::MySqlOptions;
use self::sql::{DecisionWrite, SizeLimit, Statements};
use self::statement_pool::{ServerTraits, StatementPool};
use self::wake::Polls;
pub use self::within::{InMySql, MySqlTransaction, Transaction};
use crate::clock::{Clock, Instant};
use crate::combine::race;
use crate::key::Key;
use crate::kit::held::held_by_another;
use crate::kit::looks::{LOOKS, looked_in_vain, pause_before};
use crate::kit::per_runtime::{Here, PerRuntime};
use crate::kit::rows::{AdmissionOutcome, FoundRow, corrupt};
use crate::kit::waiting::WaiterTable;
use crate::kit::work::{Effect, EndRow, JournalRow, WorkLanes, WriteTurns, by_key};
use crate::record::{
    Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, OwnerToken, Record, Release, Reservation,
    ReserveRequest, State, Verdict,
};
use crate::store::{
    Answers, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::{PerProcess, SharedOnce, lock};

// One file contains the transactions of both releases of sqlx: the interfaces of the two releases differ only in names,
// which each module around that file defines.

#[cfg(feature = "with-sqlx-0_8")]
#[path = "."]
mod with_sqlx_0_8 {
    use ::sqlx_0_8 as sqlx;

    #[path = "with_sqlx.rs"]
    mod driver;

    /// Converts the text of a statement to the type that this release takes.
    fn sql(text: &str) -> &str {
        text
    }
}

#[cfg(feature = "with-sqlx-0_9")]
#[path = "."]
mod with_sqlx_0_9 {
    use ::sqlx_0_9 as sqlx;

    #[path = "with_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    mod driver;

    /// Converts the text of a statement to the type that this release takes. A text contains values of the user only
    /// as hexadecimal digits.
    fn sql(text: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(text.to_owned())
    }
}

/// Largest number of leases that one statement renews. This number limits the time for which the statement locks the
/// rows of the leases against attempts that finish.
const RENEWED_AT_ONCE: usize = 128;
/// Number of retries for a lease whose record is locked, within about 60 ms.
const RENEWED_AGAIN: u32 = 6;
/// Number of rows that the background purge reads in one statement.
const PURGED_AT_ONCE: u32 = 500;
/// Number of connections for renewals and late writes. At least one connection carries renewals only.
const UPKEEP_CONNECTIONS: usize = 2;

/// Time after which a reservation without an answer is forgotten. The engine repeats a reservation much earlier.
const DOUBTED: Duration = Duration::from_secs(60);

/// Returns the error for a record that stayed locked, or changed between all [`LOOKS`] reads.
fn locked_or_changing(kind: StoreErrorKind) -> StoreError {
    looked_in_vain(kind, "stayed locked by another session, or kept changing")
}

/// Adapts the error of a read that should have shown whether a write took effect.
fn after_write(error: StoreError) -> StoreError {
    match error.kind() {
        StoreErrorKind::Unavailable => {
            StoreError::new(StoreErrorKind::Unconfirmed, error.to_string()).with_source(error)
        }
        _ => error,
    }
}

/// A store in a server of MySQL, 8.0 or newer, or of MariaDB, 10.6 or newer.
///
/// - *Atomicity*: the primary key decides which attempt reserves a key. All later changes are `UPDATE`s that compare
///   the owner token. Each statement is its own transaction, under `READ COMMITTED`, whatever the server's default is.
///   Keys and all other texts are binary, because the servers compare other texts without regard to case.
/// - *Clock*: the server's clock, in UTC. A step of that clock, or a failover to a server whose clock differs, shifts
///   leases and retentions.
/// - *Durability*: the server's settings decide. With `innodb_flush_log_at_trx_commit = 1` (the server's default), and
///   with `sync_binlog = 1` if there is a binary log (the default of MySQL, not of MariaDB), a crash loses no
///   acknowledged write; otherwise [`connect`](MySqlStore::connect) logs a warning. A failover to a replica forgets the
///   writes that had not reached the replica; semi-synchronous replication limits this loss.
/// - *Limits*: keys up to [`Key::MAX_BYTES`]; results up to `max_result_bytes`, and never more than the server's
///   `max_allowed_packet` less 16 KiB. A server that writes a log of changes needs `binlog_format` `ROW` or `MIXED`.
///   All connections have to reach one primary: neither a proxy that splits reads from writes, nor a cluster with
///   several servers that write. Only [`purge`](Store::purge) and [`purge_every`](MySqlOptions::purge_every) delete the
///   rows of expired records.
/// - *Cost*: two statements for a first run; one for a replay or a running attempt on MariaDB, and on MySQL once most
///   calls are replays (two before). Statements of concurrent tasks are sent together and share one commit. A lone
///   statement never waits for others, and a result or a journal of steps over 8 KB has its own statement. A heartbeat
///   is one statement for up to 128 leases. A duplicate that waits for a running attempt is woken immediately if the
///   attempt ends in the same process. Otherwise all waiting duplicates of a runtime poll with one statement every 50
///   ms for up to 64 keys. A call for a key that a transaction of the user holds waits for 1 s at most.
///
/// [`ensure_schema`](MySqlOptions::ensure_schema) creates the table, or your own migrations do, from
/// [`schema_sql`](MySqlStore::schema_sql). Clones share the connections. Each tokio runtime that uses the store has its
/// own connections, which end with it.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::MySqlStore;
/// let url = "mysql://shop:password@localhost/shop";
/// let store = MySqlStore::options().ensure_schema().connect(url).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct MySqlStore(Arc<MySqlInner>);

impl MySqlStore {
    /// Connects to the server at `url`: `mysql://[user[:password]@]host[:port]/database`. `?require_ssl=true` encrypts
    /// and checks the certificate (feature `mysql-tls`); otherwise the connection is not encrypted. For more settings
    /// see [`MySqlOptions`].
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for an invalid URL, a refused login, a server that is too old or another
    /// product, a server that only reads or shows a source, a cluster with several servers that write, a binary log of
    /// statements, or a table that is missing or of another version;
    /// [`StoreErrorKind::Unavailable`] if no server answers.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Returns the default settings, to be changed before connecting.
    pub fn options() -> MySqlOptions {
        MySqlOptions::default()
    }

    /// Returns the statement that creates the table with this name, for your own migrations. The statement may be run
    /// repeatedly. For more settings see [`MySqlOptions::schema_sql`].
    ///
    /// ```
    /// # use idem_runtime::MySqlStore;
    /// assert!(MySqlStore::schema_sql("idem_records").contains("CREATE TABLE IF NOT EXISTS `idem_records`"));
    /// ```
    pub fn schema_sql(table: &str) -> String {
        Self::options().table(table).schema_sql()
    }
}

impl fmt::Debug for MySqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(MySqlStore);

struct MySqlInner {
    this: Weak<MySqlInner>,
    common: Arc<MySqlCore>,
    /// Largest number of connections that this handle opens in each runtime.
    connections: usize,
    /// True for the handle that makes renewals and late writes.
    is_upkeep: bool,
    /// The handle for renewals and late writes, made at its first use. Forked processes may share this handle, because
    /// it opens no connection before its first use in a process.
    upkeep: SharedOnce<Arc<MySqlInner>>,
    runtimes: PerRuntime<RuntimeLanes>,
    /// Handle of the background purge, which ends when this field is dropped.
    purger: PerProcess<OnceLock<oneshot::Sender<()>>>,
}

/// The state that the two handles of a store (for calls, for upkeep) share. This state belongs to no runtime, and a
/// forked child uses its copy.
struct MySqlCore {
    context: Arc<StoreContext>,
    clock: Arc<dyn Clock>,
    table: Box<str>,
    namespace: Box<str>,
    response_timeout: Duration,
    sql: Arc<Statements>,
    opts: Opts,
    traits: Arc<OnceLock<ServerTraits>>,
    waiters: Arc<PerProcess<WaiterTable>>,
    /// False for a store that was opened for reading only.
    writes: bool,
    purge_every: Option<Duration>,
}

/// The state of one runtime: connections and tasks that end with it.
struct RuntimeLanes {
    server: Arc<StatementPool>,
    reserves: WorkLanes<Reservations>,
    begins: WorkLanes<BeginMarks>,
    appends: WorkLanes<JournalWrites>,
    ends: WorkLanes<EndWrites>,
    polls: Polls,
    doubts: Doubts,
}

/// Owner tokens of reservations whose answer is missing, so that the server may still be writing them.
#[derive(Default)]
struct Doubts(Mutex<HashMap<OwnerToken, Instant>>);

impl Doubts {
    /// Notes a reservation without an answer, and forgets the reservations of [`DOUBTED`] ago.
    fn note(&self, owner: OwnerToken, now: Instant) {
        let mut doubts = lock(&self.0);
        doubts.retain(|_, since| now.saturating_since(*since) < DOUBTED);
        doubts.insert(owner, now);
    }

    fn holds(&self, owner: OwnerToken) -> bool {
        lock(&self.0).contains_key(&owner)
    }
}

impl fmt::Debug for MySqlInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlStore").field("table", &self.common.table).finish_non_exhaustive()
    }
}

impl MySqlCore {
    /// Makes the state of a runtime.
    fn local(&self, is_upkeep: bool, connections: usize) -> RuntimeLanes {
        let database = MySqlPool::new(self.opts.clone(), connections, self.response_timeout, Arc::clone(&self.clock));
        let database = if is_upkeep { database.for_renewals() } else { database };
        let server = Arc::new(StatementPool {
            database,
            sql: Arc::clone(&self.sql),
            traits: Arc::clone(&self.traits),
            waiters: Arc::clone(&self.waiters),
            turns: WriteTurns::new(1),
        });
        RuntimeLanes {
            reserves: WorkLanes::new(Reservations::new(Arc::clone(&server))),
            begins: WorkLanes::new(BeginMarks::new(Arc::clone(&server))),
            appends: WorkLanes::new(JournalWrites::new(Arc::clone(&server))),
            ends: WorkLanes::new(EndWrites::new(Arc::clone(&server))),
            polls: Polls::default(),
            doubts: Doubts::default(),
            server,
        }
    }

    /// Returns the limit of the size of a record, which was read at `connect`.
    fn size_limit(&self) -> SizeLimit {
        self.traits.get().map_or(SizeLimit(usize::MAX), |traits| traits.size_limit)
    }
}

impl MySqlInner {
    fn new(common: Arc<MySqlCore>, connections: usize, is_upkeep: bool) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            common,
            connections,
            is_upkeep,
            upkeep: SharedOnce::new(),
            runtimes: PerRuntime::default(),
            purger: PerProcess::default(),
        })
    }

    /// Returns the state of the current runtime.
    fn here(&self) -> Result<Here<'_, RuntimeLanes>, StoreError> {
        let here = self.runtimes.here(|_| self.common.local(self.is_upkeep, self.connections)).ok_or_else(|| {
            let message = "no tokio runtime: call the store from inside one";
            StoreError::new(StoreErrorKind::Misconfigured, message)
        })?;
        if let Some(interval) = self.common.purge_every
            && !self.is_upkeep
        {
            self.purger.here().get_or_init(|| self.start_purger(interval));
        }
        Ok(here)
    }

    /// Returns the state of the current runtime. For a caller outside of any runtime, returns the state of another
    /// runtime, whose tasks then send the operation.
    fn lanes(&self) -> Result<Here<'_, RuntimeLanes>, StoreError> {
        self.here().or_else(|error| self.runtimes.any().ok_or(error))
    }

    /// Writes into the record of `lease` that the body of its attempt begins.
    async fn try_begin(&self, lease: &Lease) -> Result<Verdict, StoreError> {
        for look in 0..LOOKS {
            pause_before(look, &*self.common.clock).await;
            if self.lanes()?.begins.call(lease.clone()).await? {
                return Ok(Verdict::Applied);
            }
            let found = Box::pin(self.look(&lease.key)).await?;
            // If the attempt may still begin, another session has locked the row, so the loop tries again.
            if !found.is_some_and(|found| found.record.may_begin(lease, found.lapses_in())) {
                return Ok(Verdict::Refused);
            }
        }
        Err(locked_or_changing(StoreErrorKind::Unavailable))
    }

    /// Puts `journal` into the record of `lease`, and renews the lease.
    async fn try_append(&self, lease: &Lease, journal: &Journal) -> Result<Verdict, StoreError> {
        self.common.size_limit().check_journal(journal)?;
        for look in 0..LOOKS {
            pause_before(look, &*self.common.clock).await;
            let row = JournalRow { lease: lease.clone(), journal: journal.clone() };
            if self.lanes()?.appends.call(row).await? {
                return Ok(Verdict::Applied);
            }
            let found = Box::pin(self.look(&lease.key)).await?.map(|found| found.record);
            // If the attempt is still pending, another session has locked the row, so the loop tries again.
            if !found.is_some_and(|found| found.is_pending() && found.is_of(lease)) {
                return Ok(Verdict::Refused);
            }
        }
        Err(locked_or_changing(StoreErrorKind::Unavailable))
    }

    async fn try_reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        for look in 0..LOOKS {
            pause_before(look, &*self.common.clock).await;
            let found = match self.lanes()?.reserves.call(request.clone()).await {
                Ok(LookupResult::Made) => return Ok(Record::first(request).grant(request, false)),
                Ok(LookupResult::Found(found)) => *found.map_err(corrupt)?,
                Ok(LookupResult::Unseen) => continue,
                Ok(LookupResult::LeftOut) => {
                    // Boxed: most calls don't read a record separately, but would carry the size of this future inline.
                    match Box::pin(self.read(&request.key)).await.map_err(after_write)? {
                        Some(found) => found,
                        None => continue,
                    }
                }
                // Nothing was written, so the loop tries again.
                Err(failure) if failure.is_deadlock => continue,
                Err(failure) if failure.is_locked => return Box::pin(self.answer_locked(request, failure)).await,
                Err(failure) => {
                    if failure.kind == StoreErrorKind::Unconfirmed {
                        self.lanes()?.doubts.note(request.owner, self.common.clock.now());
                    }
                    return Err(failure.without_result().into());
                }
            };
            let (met, with, takeover) = match found.meet(request) {
                AdmissionOutcome::Answer(answer) => return Ok(answer),
                AdmissionOutcome::Replace { met, with, takeover } => (met, with, takeover),
            };
            let here = self.here()?;
            match Box::pin(here.server.replace(request, &met, &with)).await {
                Ok(true) => return Ok(with.grant(request, takeover)),
                Ok(false) => {}
                Err(failure) if failure.is_deadlock => {}
                Err(failure) => return Err(failure.without_result().into()),
            }
        }
        // Each insert was answered, and its record was gone when it was read.
        Err(locked_or_changing(StoreErrorKind::Unconfirmed))
    }

    /// Answers a request for a key whose record another session has locked. An insert has waited for the lock in vain,
    /// and has written nothing.
    async fn answer_locked(&self, request: &ReserveRequest, failure: OpFailure) -> Result<Reservation, StoreError> {
        match self.read(&request.key).await? {
            // A read waits for no lock. The record answers most requests without a write.
            Some(found) => match found.meet(request) {
                AdmissionOutcome::Answer(answer) => Ok(answer),
                AdmissionOutcome::Replace { .. } => Err(failure.without_result().into()),
            },
            // An earlier copy of this request has made the record, and its commit is still under way. The attempt must
            // not count as another one: nobody would run its body.
            None if self.lanes()?.doubts.holds(request.owner) => {
                let message = "an earlier copy of this reservation is still being written";
                Err(StoreError::new(StoreErrorKind::Unconfirmed, message))
            }
            // An open transaction has made the record.
            None => Ok(held_by_another(&request.key, 1)),
        }
    }

    /// Returns the record of `key`, expired or not.
    async fn read(&self, key: &Key) -> Result<Option<FoundRow>, StoreError> {
        self.here()?.server.look(key.as_str()).await
    }

    /// Returns the record of `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<FoundRow>, StoreError> {
        Ok(self.read(key).await?.filter(|found| !found.is_expired()))
    }

    /// Sets the state of a pending record to `state`, by compare-and-set on owner token and attempt number; for a
    /// release, on the owner token only. The answer is "applied" even if an earlier copy of this write has already
    /// ended the attempt.
    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Verdict, StoreError> {
        let record = Record::after(lease, state);
        for look in 0..LOOKS {
            pause_before(look, &*self.common.clock).await;
            let end = EndRow { key: lease.key.clone(), record: record.clone(), refund, ttl: lease.ttl };
            if self.lanes()?.ends.call(end).await? {
                return Ok(Verdict::Applied);
            }
            let found = Box::pin(self.look(&lease.key)).await.map_err(after_write)?.map(|found| found.record);
            match found {
                // The attempt is still pending: another session had locked the row. The loop tries again.
                Some(found)
                    if found.is_pending()
                        && found.owner == lease.owner
                        && (found.attempt == lease.attempt || !record.is_finished()) => {}
                found => {
                    return Ok(found.map_or(Verdict::Refused, |found| found.ended(lease, record.is_finished())));
                }
            }
        }
        Err(locked_or_changing(StoreErrorKind::Unavailable))
    }

    /// Renews the leases at the indexes `places`. Answers "applied" for each renewed lease, and "refused" for each
    /// lease that its attempt no longer holds. Returns the indexes of the other leases, whose rows another session had
    /// locked.
    async fn renew_some(
        &self,
        leases: &[Lease],
        places: &[usize],
        answer: &Answers<'_>,
    ) -> Result<Vec<usize>, StoreError> {
        let here = self.here()?;
        let StatementPool { sql, .. } = &*here.server;
        let rows: Vec<_> = places.iter().map(|place| sql::attempt(&leases[*place])).collect();
        let renew = || here.server.write_many(&sql.renew_many, &rows, Effect::Writes, true);
        let renewed = match renew().await {
            Err(failure) if failure.is_deadlock => renew().await?,
            Err(failure) if failure.is_locked => return Ok(places.to_vec()),
            Err(failure) if failure.lacks_room => return self.renew_singly(leases, places, answer).await,
            renewed => renewed?,
        };
        let mut rest = Vec::new();
        for (place, is_renewed) in places.iter().zip(renewed) {
            if is_renewed {
                answer(*place, Verdict::Applied);
            } else {
                rest.push(*place);
            }
        }
        if rest.is_empty() {
            return Ok(rest);
        }
        let rows: Vec<_> = rest.iter().map(|place| sql::attempt(&leases[*place])).collect();
        let held = match here.server.database.renew(&sql.held_many, &rows, Effect::Reads).await {
            Err(failure) if failure.lacks_room => return self.renew_singly(leases, &rest, answer).await,
            held => held?.rows,
        };
        rest.retain(|place| {
            let is_held = held.iter().any(|row| row.key() == Some(leases[*place].key.as_str().as_bytes()));
            if !is_held {
                answer(*place, Verdict::Refused);
            }
            is_held
        });
        Ok(rest)
    }

    /// Works like `renew_some`, with a statement for each lease. These statements need no temporary table, for which
    /// the server may have no room, but wait for locks.
    async fn renew_singly(
        &self,
        leases: &[Lease],
        places: &[usize],
        answer: &Answers<'_>,
    ) -> Result<Vec<usize>, StoreError> {
        let here = self.here()?;
        let StatementPool { sql, database, .. } = &*here.server;
        let mut locked = Vec::new();
        for place in places {
            match database.renew(&sql.renew, &[sql::attempt(&leases[*place])], Effect::Writes).await {
                Ok(renewed) if renewed.affected > 0 => answer(*place, Verdict::Applied),
                Ok(_) => answer(*place, Verdict::Refused),
                Err(failure) if failure.is_locked || failure.is_deadlock => locked.push(*place),
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(locked)
    }

    /// Retries the leases with locked rows a few times: a statement of this library holds a lock only briefly.
    async fn renew_locked(&self, leases: &[Lease], places: &[usize], answer: &Answers<'_>) -> Result<(), StoreError> {
        let mut locked = places.to_vec();
        for look in 2..2 + RENEWED_AGAIN {
            pause_before(look, &*self.common.clock).await;
            locked = self.renew_some(leases, &locked, answer).await?;
            if locked.is_empty() {
                return Ok(());
            }
        }
        let message = format!("another session has locked the records of {} leases", locked.len());
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    /// Applies an operator's decision to the record of its key. Returns `None` if the record has changed meanwhile, or
    /// is locked.
    async fn try_decide(&self, decision: &Decision) -> Result<Option<DecisionAnswer>, StoreError> {
        let here = self.here()?;
        let (server, key) = (&here.server, decision.key.as_str());
        let row = server.row(key).await?;
        let DecisionWrite { statement, params, effect } = match server.sql.write_of(decision, row.as_ref()) {
            Ok(write) => write,
            Err(answer) => return Ok(Some(answer)),
        };
        match server.one(statement, params, effect).await {
            Ok(answer) if answer.affected > 0 => {
                server.wake(key);
                Ok(Some(DecisionAnswer::Applied))
            }
            Ok(_) => Ok(None),
            Err(failure) if failure.is_deadlock => Ok(None),
            Err(failure) => Err(failure.into()),
        }
    }

    /// Purges up to `batch` records whose `listed_at` has passed: removes the expired records, and postpones the
    /// records that were renewed. Returns the numbers of removed and of postponed records. Skips rows that another
    /// session is writing, and leaves them to a later purge.
    async fn purge_batch(&self, batch: u32) -> Result<(u64, u64), StoreError> {
        let here = self.here()?;
        let StatementPool { sql, database, .. } = &*here.server;
        let due = here.server.one(&sql.due, vec![i64::from(batch).into()], Effect::Reads).await?.rows;
        let (mut over, mut kept) = (Vec::new(), Vec::new());
        for row in &due {
            let Ok(Some(key)) = row.bytes(0) else { continue };
            let is_over = row.int(1) == Ok(Some(1));
            if is_over { &mut over } else { &mut kept }.push(vec![sql::Param::from(&key[..])]);
        }
        let mut counts = [0; 2];
        for (count, statement, mut keys) in [(0, &sql.delete_many, over), (1, &sql.relist_many, kept)] {
            // All sessions lock rows in the order of their keys.
            keys.sort_by(|a, b| a[0].bytes().cmp(b[0].bytes()));
            for some in keys.chunks(sql::AT_ONCE) {
                counts[count] += database.run(statement, some, Effect::Writes).await?.affected as u64;
            }
        }
        Ok((counts[0], counts[1]))
    }

    /// Purges every `interval` until the returned sender is dropped. Uses the connections for upkeep, because the
    /// caller's runtime may be blocked.
    fn start_purger(&self, interval: Duration) -> oneshot::Sender<()> {
        let (upkeep, clock) = (Arc::downgrade(self.upkeep_of()), Arc::clone(&self.common.clock));
        let (sender, mut over) = oneshot::channel();
        self.common.clock.spawn(Box::pin(async move {
            while race(&mut over, clock.sleep(interval)).await.is_none() {
                loop {
                    let Some(upkeep) = upkeep.upgrade() else { return };
                    match upkeep.purge_batch(PURGED_AT_ONCE).await {
                        Ok((gone, kept)) if gone + kept >= u64::from(PURGED_AT_ONCE) => {}
                        Ok(_) => break,
                        Err(error) => {
                            tracing::warn!(%error, "expired records could not be purged; trying again");
                            break;
                        }
                    }
                }
            }
        }));
        sender
    }

    /// Returns the handle that makes renewals and late writes.
    fn upkeep_of(&self) -> &Arc<MySqlInner> {
        self.upkeep.get_or_init(|| Self::new(Arc::clone(&self.common), UPKEEP_CONNECTIONS, true))
    }
}

impl Store for MySqlInner {
    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("a borrowed store is alive")
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        if self.is_upkeep {
            return self.handle();
        }
        Arc::clone(self.upkeep_of()) as Arc<dyn Store>
    }

    fn namespace(&self) -> &str {
        &self.common.namespace
    }

    fn response_timeout(&self) -> Duration {
        self.common.response_timeout
    }

    fn context(&self) -> &StoreContext {
        &self.common.context
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn begin<'a>(&'a self, lease: &'a Lease) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_begin(lease))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let order = by_key(leases, |lease| lease.key.as_str());
            let (mut locked, mut renewed) = (Vec::new(), Ok(()));
            for places in order.chunks(RENEWED_AT_ONCE) {
                // A failed chunk must not delay the renewal of the next chunk.
                match self.renew_some(leases, places, answer).await {
                    Ok(some) => locked.extend(some),
                    Err(error) => renewed = Err(error),
                }
            }
            for places in locked.chunks(RENEWED_AT_ONCE) {
                renewed = self.renew_locked(leases, places, answer).await.and(renewed);
            }
            renewed
        })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_append(lease, journal))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            self.common.size_limit().check_result(finish.result())?;
            self.end(lease, finish.state(), 0).await
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.end(lease, release.state(), i64::from(!release.counts())))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let clock = &*self.common.clock;
            let until = clock.now().saturating_add(at_most);
            let here = self.here()?;
            loop {
                let left = until.saturating_since(clock.now());
                Box::pin(here.polls.wait(&here.server, key.as_str(), attempt, left)).await?;
                let found = self.look(key).await?.map(FoundRow::inspection);
                let goes_on = found.as_ref().is_some_and(|it| it.record.is_pending() && it.attempt() == attempt);
                if !goes_on || clock.now() >= until {
                    return Ok(found);
                }
            }
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move {
            let row = self.here()?.server.row(key.as_str()).await?;
            Ok(row.and_then(|row| sql::examine(&row)).map(|examined| examined.inspection))
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            self.common.size_limit().check_decision(decision)?;
            for look in 0..LOOKS {
                pause_before(look, &*self.common.clock).await;
                if let Some(decided) = Box::pin(self.try_decide(decision)).await? {
                    return Ok(decided);
                }
            }
            Err(locked_or_changing(StoreErrorKind::Unavailable))
        })
    }

    /// Runs one statement that reads the index of `listed_at` without locks, and two statements for each 64 rows.
    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        StoreFuture::new(async move { Ok(self.purge_batch(batch).await?.0) })
    }

    /// Runs one statement, which reads the rows in the order of their keys, and one more statement for each damaged
    /// row.
    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(async move {
            let here = self.here()?;
            let statements = &here.server.sql;
            let list = if filter.undecided { &statements.list_undecided } else { &statements.list };
            let (params, looked_at) = sql::list(filter);
            let rows = here.server.one(list, params, Effect::Reads).await?.rows;
            let mut page = sql::page(&rows, filter, looked_at);
            for key in page.damaged() {
                let now = self.inspect(&key).await?;
                page.show(filter, &key, now);
            }
            Ok(page)
        })
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let common = &self.common;
            self.here()?.server.ping(&common.table, common.writes, common.purge_every.is_some()).await
        })
    }
}

/// Reads an untrusted row of all columns, for tests.
///
/// # Errors
/// If the row is no record.
#[cfg(feature = "conformance")]
pub fn read_row(values: Vec<mysql_async::Value>) -> Result<Inspection, StoreError> {
    sql::found(&values.into(), crate::record::ReadExtent::Whole).map(FoundRow::inspection).map_err(corrupt)
}
