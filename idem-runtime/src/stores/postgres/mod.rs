//! Records in a table of a PostgreSQL server.
//!
//! A record is one row. `INSERT … ON CONFLICT DO NOTHING` reserves a key, and the same statement reads an existing row:
//! a replay neither locks nor writes a row. Every change of a row by an attempt is one `UPDATE` that compares the owner
//! token, and every time is the server's `statement_timestamp()`. The store holds no transaction open while a handler
//! runs.

mod batch;
mod client;
mod failure;
mod options;
mod param;
mod sessions;
mod sql;
mod statement_pool;
mod wake;
#[cfg(feature = "with-tokio-postgres-0_7")]
mod with_tokio_postgres;
pub(crate) mod within;

use self::statement_pool::StatementPool;
use std::fmt;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio_postgres::types::ToSql;

use self::batch::{BeginMarks, EndWrites, JournalWrites, Reservations, SentMarks, SentRow};
use self::client::Database;
use self::failure::{OpFailure, misconfigured};
pub use self::options::PostgresOptions;
use self::param::LeaseParams;
use self::sessions::{ConnectionSource, Sessions};
#[cfg(feature = "conformance")]
pub use self::sql::Cells;
use self::sql::{Executor, LookupResult, Statement, Statements};
use self::wake::{Listener, Mark, Wakeups};
pub use self::within::{InPostgres, Transaction};
use crate::clock::Clock;
use crate::combine::{all, race};
use crate::key::Key;
use crate::kit::held::held_by_another;
use crate::kit::looks::{LOOKS, looked_in_vain, pause_before};
use crate::kit::per_runtime::{Here, PerRuntime};
use crate::kit::rows::{AdmissionOutcome, FoundRow, Micros, corrupt};
use crate::kit::work::{Effect, EndRow, JournalRow, WorkLanes, WriteTurns, by_key};
use crate::record::{
    Action, Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Record, Release, Reservation, ReserveRequest,
    State, Verdict,
};
use crate::store::{
    Answers, Filter, Page, Store, StoreContext, StoreError, StoreErrorKind, StoreFuture, store_of_shared,
};
use crate::sync::{PerProcess, Process, SharedOnce};

// One file contains the transactions of both releases of sqlx: the interfaces of the two releases differ only in names,
// which each module around that file defines.

#[cfg(feature = "with-sqlx-0_8")]
#[path = "."]
mod with_sqlx_0_8 {
    use ::sqlx_0_8 as sqlx;
    use sqlx::TransactionManager;

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
    // This release of sqlx does not export this trait, although types that it does export implement the trait.
    use sqlx_core::transaction::TransactionManager;

    #[path = "with_sqlx.rs"]
    #[allow(clippy::duplicate_mod, reason = "each release of sqlx has its own types")]
    mod driver;

    /// Converts the text of a statement to the type that this release takes. No text contains a value of the user.
    fn sql(text: &str) -> sqlx::AssertSqlSafe<String> {
        sqlx::AssertSqlSafe(text.to_owned())
    }
}

/// Number of reads, within about 60 ms, after which a record that exists but is not visible is reported as held by a
/// transaction. Usually another session is just committing the record; a transaction of the user may keep the record
/// invisible for longer.
const LOOKS_AT_UNSEEN: u32 = 8;
/// Largest number of leases that one statement renews. This number limits the time for which the statement locks the
/// rows of the leases against attempts that finish.
const RENEWED_AT_ONCE: usize = 500;
/// Number of retries for a lease whose record is locked, within about 60 ms.
const RENEWED_AGAIN: u32 = 6;
/// Number of rows that the background purge reads in one statement.
const PURGED_AT_ONCE: u32 = 500;
/// Number of connections for renewals and late writes. At least one connection carries renewals only.
const UPKEEP_CONNECTIONS: usize = 2;

/// Returns the error for a record that stayed locked, or changed between all [`LOOKS`] reads.
fn locked_or_changing(kind: StoreErrorKind) -> StoreError {
    looked_in_vain(kind, "stayed locked by another session, or kept changing")
}

/// A store in a PostgreSQL server, 12 or newer.
///
/// - *Atomicity*: the primary key decides which attempt reserves a key. All later changes are `UPDATE`s that compare
///   the owner token. Each statement is its own transaction.
/// - *Clock*: the server's clock. A step of that clock, or a failover to a server whose clock differs, shifts leases
///   and retentions.
/// - *Durability*: the server's settings decide. With `fsync` and `synchronous_commit` on (the server's default), a
///   crash loses no acknowledged write. If one of the two settings is off, [`connect`](PostgresStore::connect) logs a
///   warning. A failover to a standby that is not synchronous forgets the writes that had not reached the standby.
/// - *Limits*: keys up to [`Key::MAX_BYTES`], results up to `max_result_bytes`, and never more than 1 GB. Only
///   [`purge`](Store::purge) and [`purge_every`](PostgresOptions::purge_every) delete the rows of expired records.
/// - *Cost*: two statements for a first run, one for a replay or a running attempt. Statements of concurrent tasks are
///   sent together and share one commit. A lone statement never waits, and a result or a journal of steps over 8 KB has
///   its own statement. A heartbeat is one statement for up to 500 leases. The server compresses large results, with
///   lz4 if it supports lz4.
///
/// [`ensure_schema`](PostgresOptions::ensure_schema) creates the table, or your own migrations do, from
/// [`schema_sql`](PostgresStore::schema_sql). Clones share the connections. Each tokio runtime that uses the store has
/// its own connections, which end with it.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::PostgresStore;
/// let url = "postgres://shop:password@localhost/shop";
/// let store = PostgresStore::options().ensure_schema().connect(url).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresStore(Arc<PostgresInner>);

impl PostgresStore {
    /// Connects to the server at `url`: `postgres://[user[:password]@]host[:port][/database]`, or `key=value` pairs in
    /// the form of libpq. `sslmode=require` encrypts and checks the certificate (feature `postgres-tls`); otherwise the
    /// connection is not encrypted. If the URL names several hosts, the store uses the host that accepts writes. For
    /// more settings see [`PostgresOptions`].
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for an invalid URL, a refused login, a server that is too old or not
    /// PostgreSQL, a standby, or a table that is missing or of another version; [`StoreErrorKind::Unavailable`] if no
    /// server answers.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Returns the default settings, to be changed before connecting.
    pub fn options() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// Returns the statements that create the table in a schema of this name, for your own migrations. The statements
    /// may be run repeatedly. For more settings see [`PostgresOptions::schema_sql`].
    ///
    /// ```
    /// # use idem_runtime::PostgresStore;
    /// assert!(PostgresStore::schema_sql("idem").contains(r#"CREATE TABLE IF NOT EXISTS "idem".records"#));
    /// ```
    pub fn schema_sql(schema: &str) -> String {
        Self::options().schema(schema).schema_sql()
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

store_of_shared!(PostgresStore);

struct PostgresInner {
    this: Weak<PostgresInner>,
    common: Arc<PostgresCore>,
    /// Largest number of connections that this handle opens in each runtime.
    connections: usize,
    /// True for the handle that makes renewals and late writes.
    is_upkeep: bool,
    /// The handle for renewals and late writes, made at its first use. Forked processes may share this handle, because
    /// it opens no connection before its first use in a process.
    upkeep: SharedOnce<Arc<PostgresInner>>,
    runtimes: PerRuntime<Local>,
    /// Handle of the background purge, which ends when this field is dropped.
    purger: PerProcess<OnceLock<oneshot::Sender<()>>>,
}

/// The state that the two handles of a store (for calls, for upkeep) share. This state belongs to no runtime, and a
/// forked child uses its copy.
struct PostgresCore {
    context: Arc<StoreContext>,
    clock: Arc<dyn Clock>,
    schema: Box<str>,
    namespace: Box<str>,
    response_timeout: Duration,
    /// True if each connection is one session of the server, so that the session keeps prepared statements; false
    /// behind a pooler.
    has_sessions: bool,
    sql: Arc<Statements>,
    calls: ConnectionSource,
    upkeep: ConnectionSource,
    listener: Option<Listener>,
    /// False for a store that was opened for reading only.
    writes: bool,
    purge_every: Option<Duration>,
    /// The `listed_at` at which the next purge begins: the latest `listed_at` that the previous purge read, or the
    /// earliest time if the previous purge reached the end of the index.
    purged_to: AtomicI64,
    /// The process that opened the store.
    process: Process,
}

/// The state of one runtime: connections and tasks that end with it.
struct Local {
    server: Arc<StatementPool>,
    reserves: WorkLanes<Reservations>,
    begins: WorkLanes<BeginMarks>,
    appends: WorkLanes<JournalWrites>,
    ends: WorkLanes<EndWrites>,
    sent: WorkLanes<SentMarks>,
    wakeups: Wakeups,
}

impl fmt::Debug for PostgresInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("schema", &self.common.schema).finish_non_exhaustive()
    }
}

impl PostgresCore {
    /// Makes the state of a runtime. `is_first` is true for the first runtime of a process that uses the store.
    fn local(&self, is_upkeep: bool, connections: usize, is_first: bool) -> Local {
        let (clock, limit) = (&self.clock, self.response_timeout);
        let source = match &self.calls {
            _ if is_upkeep => self.upkeep.clone(),
            // The connections of the user's pool end with the runtime that opened them, and a forked child must not use
            // its parent's connections. Other runtimes and processes therefore open their own connections.
            ConnectionSource::Pool(pool) if !is_first || !self.process.is_this() => {
                ConnectionSource::LikePool(pool.clone())
            }
            calls => calls.clone(),
        };
        let sessions = Sessions::new(source, connections, limit, Arc::clone(clock));
        let database = Database::new(sessions, Arc::clone(clock), limit, self.has_sessions);
        let database = if is_upkeep { database.for_renewals() } else { database };
        let server = Arc::new(StatementPool { database, sql: Arc::clone(&self.sql), turns: WriteTurns::new(2) });
        Local {
            reserves: WorkLanes::new(Reservations::new(Arc::clone(&server))),
            begins: WorkLanes::new(BeginMarks::new(Arc::clone(&server))),
            appends: WorkLanes::new(JournalWrites::new(Arc::clone(&server))),
            ends: WorkLanes::new(EndWrites::new(Arc::clone(&server))),
            sent: WorkLanes::new(SentMarks::new(Arc::clone(&server))),
            wakeups: Wakeups::new(self.listener.clone(), sql::channel(&self.schema), Arc::clone(clock)),
            server,
        }
    }
}

impl PostgresInner {
    fn new(common: Arc<PostgresCore>, connections: usize, is_upkeep: bool) -> Arc<Self> {
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
    fn here(&self) -> Result<Here<'_, Local>, StoreError> {
        let make = |is_first| self.common.local(self.is_upkeep, self.connections, is_first);
        let here = self.runtimes.here(make).ok_or_else(|| {
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
    fn lanes(&self) -> Result<Here<'_, Local>, StoreError> {
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
        sql::check_journal(journal)?;
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
            let found = match self.lanes()?.reserves.call(request.clone()).await.map_err(OpFailure::without_result)? {
                LookupResult::Made => {
                    return Ok(Record::first(request).grant(request, false));
                }
                LookupResult::Found(found) => *found.map_err(corrupt)?,
                // The next statement will see the record, unless an open transaction has made the record.
                LookupResult::Unseen if look + 1 < LOOKS_AT_UNSEEN => continue,
                LookupResult::Unseen => return Ok(held_by_another(&request.key, 1)),
                LookupResult::LeftOut => {
                    let here = self.here()?;
                    // Boxed: most calls don't read a record separately, but would carry the size of this future inline.
                    match Box::pin(here.server.sql.look_at(&*here.server, request.key.as_str())).await? {
                        Some(found) => found,
                        None => continue,
                    }
                }
            };
            let (met, with, takeover) = match found.meet(request) {
                AdmissionOutcome::Answer(answer) => return Ok(answer),
                AdmissionOutcome::Replace { met, with, takeover } => (met, with, takeover),
            };
            let here = self.here()?;
            let replaced = Box::pin(here.server.sql.replace_met(&*here.server, request, &met, &with)).await;
            if replaced.map_err(OpFailure::without_result)? {
                return Ok(with.grant(request, takeover));
            }
        }
        Err(locked_or_changing(StoreErrorKind::Unavailable))
    }

    /// Returns the record of `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<FoundRow>, StoreError> {
        let here = self.here()?;
        let found = here.server.sql.look_at(&*here.server, key.as_str()).await?;
        Ok(found.filter(|found| !found.is_expired()))
    }

    /// Waits until attempt number `attempt` of `key` may have ended: until a notification arrives, or the polling
    /// interval is over.
    async fn wait_for_a_sign(&self, key: &Key, attempt: u32, at_most: Duration) -> Result<(), StoreError> {
        let here = self.here()?;
        let mark = async {
            let sql = &here.server.sql;
            let marks = here.wakeups.listens();
            let (statement, effect) =
                if marks { (&sql.mark, Effect::Writes) } else { (&sql.is_pending, Effect::Reads) };
            let rows = here.server.rows(statement, &[&key.as_str(), &i64::from(attempt)], effect).await?;
            let says = |at: usize| rows.first().and_then(|row| row.try_get(at).ok()).unwrap_or(false);
            Ok(match says(0) {
                false => Mark::Over,
                true if marks && says(1) => Mark::Made,
                true => Mark::Refused,
            })
        };
        Box::pin(here.wakeups.wait(key.as_str(), at_most, mark)).await
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
            let found = Box::pin(self.look(&lease.key)).await?.map(|found| found.record);
            match found {
                // The attempt is still pending: another session had locked the row, or the row was not visible yet. The
                // loop tries again.
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
        let StatementPool { database, sql, .. } = &*here.server;
        let asked = LeaseParams::new(places.iter().map(|place| &leases[*place]));
        let renewed = match ask_about(&asked, database, &sql.renew, Effect::Writes).await {
            Err(failure) if failure.is_deadlock => ask_about(&asked, database, &sql.renew, Effect::Writes).await?,
            // Another session locked a row while the statement ran. The next statement skips that row from the start.
            Err(failure) if failure.is_locked => return Ok(places.to_vec()),
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
        let asked = LeaseParams::new(rest.iter().map(|place| &leases[*place]));
        let mut held = ask_about(&asked, database, &sql.held, Effect::Reads).await?.into_iter();
        rest.retain(|place| {
            let is_held = held.next().unwrap_or(false);
            if !is_held {
                answer(*place, Verdict::Refused);
            }
            is_held
        });
        Ok(rest)
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

    /// Purges up to `batch` records whose `listed_at` has passed: removes the expired records, and postpones the
    /// records that were renewed. Returns the numbers of removed and of postponed records.
    async fn purge_batch(&self, batch: u32) -> Result<(u64, u64), StoreError> {
        let from = Micros(self.common.purged_to.load(Ordering::Relaxed));
        let (mut gone, mut kept) = self.purge_from(from, batch).await?;
        // A second purge starts from the beginning. The second purge finds records that were locked during an earlier
        // purge, or whose `listed_at` has been set to an earlier time since.
        let rest = u64::from(batch).saturating_sub(gone + kept);
        if rest > 0 && from != Micros::FIRST {
            let more = self.purge_from(Micros::FIRST, u32::try_from(rest).unwrap_or(batch)).await?;
            (gone, kept) = (gone + more.0, kept + more.1);
        }
        Ok((gone, kept))
    }

    /// Purges records whose `listed_at` is `from` or later. The next purge goes on where this purge ended: the index
    /// keeps the entries of removed rows until the next vacuum, and a purge from the beginning would read all of these
    /// entries.
    async fn purge_from(&self, from: Micros, batch: u32) -> Result<(u64, u64), StoreError> {
        let here = self.here()?;
        let rows = here.server.rows(&here.server.sql.purge, &[&i64::from(batch), &from], Effect::Writes).await?;
        let count = |at: usize| {
            let count: Option<i64> = rows.first().and_then(|row| row.try_get(at).ok());
            u64::try_from(count.unwrap_or_default()).unwrap_or_default()
        };
        let (gone, kept) = (count(0), count(1));
        let last: Option<Micros> = rows.first().and_then(|row| row.try_get(2).ok());
        let next = last.filter(|_| gone + kept >= u64::from(batch)).unwrap_or(Micros::FIRST);
        self.common.purged_to.store(next.0, Ordering::Relaxed);
        Ok((gone, kept))
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
    fn upkeep_of(&self) -> &Arc<PostgresInner> {
        self.upkeep.get_or_init(|| Self::new(Arc::clone(&self.common), UPKEEP_CONNECTIONS, true))
    }
}

/// Runs `statement`, which renews or checks leases. Returns for each lease whether the answer contains its index.
async fn ask_about(
    leases: &LeaseParams<'_>,
    database: &Database,
    statement: &Statement,
    effect: Effect,
) -> Result<Vec<bool>, OpFailure> {
    let params: [&(dyn ToSql + Sync); 3] = [&leases.keys, &leases.owners, &leases.attempts];
    Ok(sql::answered(&database.renew(statement, &params, effect).await?, leases.keys.len()))
}

impl Store for PostgresInner {
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
            // Two chunks of leases are in flight at a time: enough to keep the server busy, while other connections
            // stay free for attempts that start and finish.
            let chunks: Vec<_> = order.chunks(RENEWED_AT_ONCE).collect();
            let mut halves = [0, 1].map(|half| {
                let chunks = chunks.iter().skip(half).step_by(2);
                Box::pin(async move {
                    let (mut locked, mut renewed) = (Vec::new(), Ok(()));
                    for places in chunks {
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
            });
            all(&mut halves).await.into_iter().collect()
        })
    }

    fn append<'a>(&'a self, lease: &'a Lease, journal: &'a Journal) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.try_append(lease, journal))
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            sql::check_size(finish.result())?;
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
            loop {
                self.wait_for_a_sign(key, attempt, until.saturating_since(clock.now())).await?;
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
            let here = self.here()?;
            here.server.sql.inspect_at(&*here.server, key.as_str()).await
        })
    }

    fn decide<'a>(&'a self, decision: &'a Decision) -> StoreFuture<'a, DecisionAnswer> {
        StoreFuture::new(async move {
            sql::check_decision(decision)?;
            // Most marks remove all messages of a record, which needs no look at it, and many marks share a statement.
            if decision.action == Action::MarkSent(None) {
                let row = SentRow { key: decision.key.clone(), seen: decision.seen };
                if self.lanes()?.sent.call(row).await? {
                    return Ok(DecisionAnswer::Applied);
                }
            }
            for look in 0..LOOKS {
                pause_before(look, &*self.common.clock).await;
                let here = self.here()?;
                if let Some(decided) = here.server.sql.try_decide(&*here.server, decision).await? {
                    return Ok(decided);
                }
            }
            Err(locked_or_changing(StoreErrorKind::Unavailable))
        })
    }

    /// Runs one statement, which walks along the index of `listed_at` from the end of the last purge. At the end of the
    /// index, a second statement starts from the beginning. The purge skips rows that another session is writing, and
    /// leaves these rows to a later purge. A record that was renewed gets a later `listed_at`.
    fn purge(&self, batch: u32) -> StoreFuture<'_, u64> {
        StoreFuture::new(async move { Ok(self.purge_batch(batch).await?.0) })
    }

    /// Runs one statement, which reads the rows in the order of their keys, and one more statement for each damaged
    /// row.
    fn list<'a>(&'a self, filter: &'a Filter) -> StoreFuture<'a, Page> {
        StoreFuture::new(async move {
            let here = self.here()?;
            let (after, end, looked_at, states) = sql::list(filter);
            let params: [&(dyn ToSql + Sync); 4] = [&after, &end, &looked_at, &states];
            let sql = &here.server.sql;
            let list = if filter.undecided { &sql.list_undecided } else { &sql.list };
            let rows = here.server.rows(list, &params, Effect::Reads).await?;
            let mut page = sql::page(&rows, filter, looked_at).map_err(corrupt)?;
            for key in page.damaged() {
                let now = here.server.sql.inspect_at(&*here.server, key.as_str()).await?;
                page.show(filter, &key, now);
            }
            Ok(page)
        })
    }

    fn ping(&self) -> StoreFuture<'_, ()> {
        StoreFuture::new(async move {
            let here = self.here()?;
            let rows = here.server.rows(&here.server.sql.ping, &[], Effect::Reads).await?;
            if !self.common.writes {
                return Ok(());
            }
            let row = rows.first();
            let mut lacks: Vec<String> = row.and_then(|row| row.try_get(1).ok()).unwrap_or_default();
            // Only the background purge needs the right to `DELETE`: calls delete no rows.
            lacks.retain(|right| right != "DELETE" || self.common.purge_every.is_some());
            if row.and_then(|row| row.try_get(0).ok()) != Some(false) {
                let message =
                    "the server allows only reading: it is a standby, or `default_transaction_read_only` is on";
                return Err(StoreError::new(StoreErrorKind::Unavailable, message));
            }
            if !lacks.is_empty() {
                let lacks = lacks.join(", ");
                return Err(misconfigured(format!(
                    "the login lacks {lacks} on the table; `idem schema print postgres --login NAME` prints the grants"
                )));
            }
            Ok(())
        })
    }
}

/// Reads an untrusted row of all columns, for tests. Returns `None` if the row shows that the statement
/// made the record.
///
/// # Errors
/// If the row is no record.
#[cfg(feature = "conformance")]
pub fn read_row(row: &impl Cells) -> Result<Option<Inspection>, StoreError> {
    match sql::met(row, sql::Columns::All) {
        sql::LookupResult::Made => Ok(None),
        sql::LookupResult::Found(found) => found.map(|found| Some(found.inspection())).map_err(corrupt),
        sql::LookupResult::Unseen | sql::LookupResult::LeftOut => {
            Err(corrupt(crate::record::format::FormatError::Damaged))
        }
    }
}
