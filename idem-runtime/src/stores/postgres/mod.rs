//! Records in a table of a PostgreSQL server.
//!
//! A record is one row. `INSERT … ON CONFLICT DO NOTHING` reserves a key, and the same statement reads an existing row: a
//! replay neither locks nor writes one. Every change of a row is one `UPDATE` that compares the owner token, and every time
//! is the server's `statement_timestamp()`. No transaction is open while a handler runs.

mod client;
mod lanes;
mod options;
mod runtimes;
mod sessions;
mod sql;
mod wake;
#[cfg(feature = "sqlx")]
mod with_sqlx;
mod within;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio_postgres::types::ToSql;

use self::client::{Database, Effect, Failure, Hidden};
use self::lanes::{Lanes, Waiting, Work};
pub use self::options::PostgresOptions;
use self::runtimes::{Here, PerRuntime};
use self::sessions::{Sessions, Source};
#[cfg(feature = "conformance")]
pub use self::sql::Cells;
use self::sql::{Ask, Found, Met, Statement, Statements, corrupt};
use self::wake::{Listener, Mark, Wakeups};
#[cfg(feature = "sqlx")]
pub use self::with_sqlx::InSqlx;
pub use self::within::InPostgres;
use crate::clock::Clock;
use crate::future::{all, race};
use crate::key::Key;
use crate::record::{
    Admission, Finish, Inspection, Lease, OwnerToken, Parts, Record, Release, Reservation, ReserveRequest, State,
    StoredResult, Verdict,
};
use crate::store::{Answers, Heartbeats, Store, StoreError, StoreErrorKind, StoreFuture, forward};
use crate::sync::{PerProcess, Process};

/// How often a call looks at a record before it gives up. Each retry means that another attempt won, or that another
/// session has locked the row.
const LOOKS: u32 = 20;
/// The longest pause between two looks. All pauses together take about a second.
const LONGEST_PAUSE: Duration = Duration::from_millis(64);
/// The error after the last look.
const LOOKED: &str = "the record was locked by another session, or changed, each time it was looked at";
/// How many leases one statement renews: it bounds how long their rows are locked against attempts that finish.
const RENEWED_AT_ONCE: usize = 500;
/// How often a lease whose record is locked is tried again, within some 60 ms.
const RENEWED_AGAIN: u32 = 6;
/// How many of the last 256 reservations, about, must have been replays for the next one to look before it reserves.
const MOSTLY: u32 = 128;
/// Rows that the background purge looks at in one statement.
const PURGED_AT_ONCE: u32 = 500;
/// Connections for renewals and late writes. At least one of them only renews.
const UPKEEP_CONNECTIONS: usize = 2;

/// The pause before look number `look`, counted from zero. The second look comes at once: a row that the first could not
/// see yet is mostly visible by now.
async fn pause(clock: &dyn Clock, look: u32) {
    if let Some(doublings) = look.checked_sub(2) {
        clock.sleep(Duration::from_millis(1 << doublings.min(6)).min(LONGEST_PAUSE)).await;
    }
}

/// A store in a PostgreSQL server, 12 or newer.
///
/// - *Atomicity*: the primary key decides which attempt reserves a key; `UPDATE`s that compare the owner token decide the
///   rest. Each is a transaction of its own.
/// - *Clock*: the server's. A clock step of the server, or a failover to one whose clock differs, shifts leases and
///   retentions.
/// - *Durability*: the server's own. With `fsync` and `synchronous_commit` on (the server's default), a crash loses nothing
///   acknowledged; otherwise [`connect`](PostgresStore::connect) logs a warning. A failover to a standby that is not
///   synchronous forgets what had not reached it.
/// - *Limits*: keys up to [`Key::MAX_BYTES`], results up to `max_result_bytes`, in any case up to 1 GB. Rows are deleted
///   only by [`purge`](PostgresStore::purge) or [`purge_every`](PostgresOptions::purge_every).
/// - *Cost*: two statements for a first run, one for a replay or a running attempt. Statements of concurrent tasks are sent
///   together and share one commit; a lone one never waits. A heartbeat is one statement for up to 500 leases.
///
/// [`ensure_schema`](PostgresOptions::ensure_schema) creates the table, or your own migrations do, from
/// [`schema_sql`](PostgresStore::schema_sql). Clones share the connections. Each tokio runtime that uses the store has
/// connections of its own, which end with it.
///
/// ```no_run
/// # async fn connect() -> Result<(), idem_runtime::StoreError> {
/// use idem_runtime::PostgresStore;
/// let url = "postgres://shop:password@localhost/shop";
/// let store = PostgresStore::options().ensure_schema().connect(url).await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct PostgresStore(Arc<Shared>);

impl PostgresStore {
    /// Connects to the server at `url`: `postgres://[user[:password]@]host[:port][/database]`, or `key=value` pairs as
    /// libpq takes them. `sslmode=require` encrypts and checks the certificate (feature `postgres-tls`); without it nothing
    /// is encrypted. Of several hosts, the one that accepts writes is used. [`PostgresOptions`] has more settings.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for an invalid URL, a refused login, a server that is too old or not PostgreSQL, a
    /// standby, or a table that is missing or of another version; [`StoreErrorKind::Unavailable`] if no server answers.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Settings for a connection.
    pub fn options() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// The statements that create the table in a schema of this name, for your own migrations. They may be run repeatedly.
    ///
    /// ```
    /// # use idem_runtime::PostgresStore;
    /// assert!(PostgresStore::schema_sql("idem").contains(r#"CREATE TABLE IF NOT EXISTS "idem".records"#));
    /// ```
    pub fn schema_sql(schema: &str) -> String {
        sql::ddl(schema)
    }

    /// Deletes expired records, looking at `batch` rows at most. Returns how many it deleted.
    ///
    /// It is one statement. Rows that another session is writing are left for the next purge, and records that were renewed
    /// since are put off. Purging changes nothing but the size of the table.
    ///
    /// # Errors
    /// [`StoreError`] if the server did not confirm; the call may be repeated.
    pub async fn purge(&self, batch: u32) -> Result<u64, StoreError> {
        Ok(self.0.purge(batch).await?.0)
    }

    /// Waits until late writes and renewals are done; see [`Heartbeats::flush`].
    pub async fn flush(&self) {
        self.0.common.heartbeats.flush().await;
    }

    fn shared(&self) -> &Shared {
        &self.0
    }
}

impl fmt::Debug for PostgresStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

forward! { () PostgresStore => shared; }

struct Shared {
    this: Weak<Shared>,
    common: Arc<Common>,
    /// The most connections of each runtime.
    connections: usize,
    /// Whether this is the handle for renewals and late writes.
    is_upkeep: bool,
    /// Shared with forked processes: it has no connection before its first use in a process.
    upkeep: OnceLock<Arc<Shared>>,
    mine: PerProcess<Mine>,
}

/// The state that is the same for every handle, process and runtime.
struct Common {
    heartbeats: Arc<Heartbeats>,
    clock: Arc<dyn Clock>,
    schema: Box<str>,
    namespace: Box<str>,
    response_timeout: Duration,
    /// Whether a connection is one session of the server: it is not behind a pooler.
    has_sessions: bool,
    sql: Arc<Statements>,
    calls: Source,
    upkeep: Source,
    listener: Option<Listener>,
    purge_every: Option<Duration>,
    /// The process that opened the store.
    process: Process,
}

/// The state of one process.
#[derive(Default)]
struct Mine {
    runtimes: PerRuntime<Local>,
    /// Ends the background purge when it is dropped.
    purger: OnceLock<oneshot::Sender<()>>,
}

/// The state of one runtime: connections and tasks that end with it.
struct Local {
    server: Arc<Server>,
    reserves: Lanes<Reserves>,
    ends: Lanes<Ends>,
    wakeups: Wakeups,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("schema", &self.common.schema).finish_non_exhaustive()
    }
}

/// The connections, and the statements sent over them.
#[derive(Debug)]
struct Server {
    database: Database,
    sql: Arc<Statements>,
    /// Held by the batch of first runs, or of their ends, that is in flight. The two take turns, so that each batch gathers
    /// the operations of all tasks; that halves the commits.
    turn: Semaphore,
}

impl Server {
    /// Whether the statement changed a row.
    async fn changes(&self, statement: &Statement, params: &[&(dyn ToSql + Sync)]) -> Result<bool, Failure> {
        Ok(!self.rows(statement, params, Effect::Writes).await?.is_empty())
    }
}

impl Ask for Server {
    type Row = tokio_postgres::Row;
    type Error = Failure;

    async fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> Result<Vec<tokio_postgres::Row>, Failure> {
        self.database.query(statement, params, effect).await
    }
}

/// Reservations.
struct Reserves {
    server: Arc<Server>,
    /// The share of replays among recent reservations, in 256ths.
    replays: AtomicU32,
}

/// The order of a batch by key. Every process locks rows in the same order, so that none waits in a circle.
fn by_key<T>(operations: &[T], key: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut order: Vec<usize> = (0..operations.len()).collect();
    order.sort_by(|a, b| key(&operations[*a]).cmp(key(&operations[*b])));
    order
}

impl Reserves {
    /// Whether most recent reservations were replays: then a plain look is enough for most.
    fn expects_replays(&self) -> bool {
        self.replays.load(Ordering::Relaxed) >= MOSTLY
    }

    /// Notes how many of `asked` reservations met a finished record.
    fn note(&self, replays: usize, asked: usize) {
        let before = self.replays.load(Ordering::Relaxed);
        let now = u32::try_from(256 * replays / asked.max(1)).unwrap_or(256);
        // A lone replay among first runs, or a first run among replays, says little.
        let weight = if asked > 8 { 4 } else { 8 };
        self.replays.store(((weight - 1) * before + now) / weight, Ordering::Relaxed);
    }

    /// Sends one of the requests for each key that is still `Unseen`, if its caller still waits.
    async fn reserve_unseen(&self, batch: &[Waiting<Self>], keys: &mut [OfKey<'_>]) -> Result<(), Failure> {
        let ready = self.server.database.ready(&self.server.sql.reserve_many).await?;
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut asked: Vec<&ReserveRequest> = Vec::new();
        for (at, of_key) in keys.iter_mut().enumerate().filter(|(_, of_key)| matches!(of_key.met, Met::Unseen)) {
            of_key.asked = of_key.places.iter().copied().find(|place| batch[*place].is_wanted());
            if let Some(place) = of_key.asked {
                let request = &batch[place].operation;
                places.insert(request.key.as_str(), at);
                asked.push(request);
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let column = |of: fn(&ReserveRequest) -> i64| asked.iter().map(|it| of(it)).collect::<Vec<_>>();
        let names: Vec<&str> = asked.iter().map(|it| it.key.as_str()).collect();
        let owners: Vec<&[u8]> = asked.iter().map(|it| &it.owner.as_bytes()[..]).collect();
        let fingerprints: Vec<_> = asked.iter().map(|it| fingerprint(it)).collect();
        let on_crash_fail: Vec<bool> = asked.iter().map(|it| on_crash_fail(it)).collect();
        let (leases, ttls) = (column(|it| sql::millis(it.lease)), column(|it| sql::millis(it.ttl)));
        let params: [&(dyn ToSql + Sync); 6] =
            [&names, &Hidden(owners), &Hidden(fingerprints), &on_crash_fail, &leases, &ttls];
        for row in &ready.query(&params, Effect::Writes).await? {
            if let Some(at) = sql::key(row).and_then(|key| places.get(key)) {
                // The old row, purged while this statement made a new one, no longer counts.
                if !matches!(keys[*at].met, Met::Made) {
                    keys[*at].met = sql::met_in_a_batch(row);
                }
            }
        }
        Ok(())
    }
}

/// The requests in a batch that are for one key.
struct OfKey<'a> {
    places: &'a [usize],
    /// The request that was sent.
    asked: Option<usize>,
    met: Met,
}

fn is_replay(met: &Met) -> bool {
    matches!(met, Met::LeftOut) || matches!(met, Met::Found(Ok(found)) if found.record.is_finished())
}

fn fingerprint(request: &ReserveRequest) -> Option<&[u8]> {
    request.fingerprint.as_ref().map(|fingerprint| &fingerprint.as_bytes()[..])
}

fn on_crash_fail(request: &ReserveRequest) -> bool {
    Parts::of(&Record::first(request)).on_crash_fail
}

impl Work for Reserves {
    type Operation = ReserveRequest;
    type Answer = Met;

    const LANES: usize = 2;
    const OUTLIVES: bool = false;

    fn database(&self) -> &Database {
        &self.server.database
    }

    fn key(request: &ReserveRequest) -> &str {
        request.key.as_str()
    }

    fn turn(&self) -> Option<&Semaphore> {
        // Replays write nothing: they keep the client busy rather than the disk.
        (!self.expects_replays()).then_some(&self.server.turn)
    }

    fn bytes(request: &ReserveRequest) -> usize {
        request.key.as_str().len() + 80
    }

    async fn one(&self, request: &ReserveRequest) -> Result<Met, Failure> {
        let key = request.key.as_str();
        if self.expects_replays() {
            let rows = self.server.rows(&self.server.sql.look, &[&key], Effect::Reads).await?;
            if let Some(row) = rows.first() {
                let met = sql::met(row);
                self.note(usize::from(is_replay(&met)), 1);
                return Ok(met);
            }
        }
        let params: [&(dyn ToSql + Sync); 6] = [
            &key,
            &Hidden(&request.owner.as_bytes()[..]),
            &Hidden(fingerprint(request)),
            &on_crash_fail(request),
            &sql::millis(request.lease),
            &sql::millis(request.ttl),
        ];
        let rows = self.server.rows(&self.server.sql.reserve, &params, Effect::Writes).await?;
        let mut met = Met::Unseen;
        for row in &rows {
            if !matches!(met, Met::Made) {
                met = sql::met(row);
            }
        }
        self.note(usize::from(is_replay(&met)), 1);
        Ok(met)
    }

    async fn many(&self, batch: &[Waiting<Self>]) -> Result<Vec<Met>, Failure> {
        let order = by_key(batch, |it| it.operation.key.as_str());
        let same = |a: &usize, b: &usize| batch[*a].operation.key == batch[*b].operation.key;
        let groups = order.chunk_by(same);
        let mut keys: Vec<OfKey<'_>> = groups.map(|places| OfKey { places, asked: None, met: Met::Unseen }).collect();
        if self.expects_replays() {
            let ready = self.server.database.ready(&self.server.sql.look_many).await?;
            let names: Vec<&str> = keys.iter().map(|it| batch[it.places[0]].operation.key.as_str()).collect();
            let places: HashMap<&str, usize> = names.iter().enumerate().map(|(at, name)| (*name, at)).collect();
            for row in &ready.query(&[&names], Effect::Reads).await? {
                if let Some(at) = sql::key(row).and_then(|key| places.get(key)) {
                    keys[*at].met = sql::met_in_a_batch(row);
                }
            }
        }
        if keys.iter().any(|it| matches!(it.met, Met::Unseen)) {
            self.reserve_unseen(batch, &mut keys).await?;
        }
        self.note(keys.iter().filter(|it| is_replay(&it.met)).count(), keys.len());
        let mut answers: Vec<Met> = batch.iter().map(|_| Met::Unseen).collect();
        for OfKey { places, asked, met } in keys {
            for place in places {
                answers[*place] = match (&met, asked) {
                    // One request made the record; the others meet it.
                    (Met::Made, Some(asked)) if asked != *place => {
                        let first = &batch[asked].operation;
                        Met::Found(Ok(Box::new(Found::made(Record::first(first), first.lease))))
                    }
                    (met, _) => met.clone(),
                };
            }
        }
        Ok(answers)
    }
}

/// The ends of attempts.
struct Ends(Arc<Server>);

/// The end of one attempt.
struct End {
    key: Key,
    record: Record,
    refund: i64,
    ttl: Duration,
}

impl Ends {
    async fn distinct(&self, ends: &[&End]) -> Result<Vec<bool>, Failure> {
        let places: HashMap<&str, usize> = ends.iter().enumerate().map(|(i, it)| (it.key.as_str(), i)).collect();
        let keys: Vec<&str> = ends.iter().map(|it| it.key.as_str()).collect();
        let parts: Vec<Parts<'_>> = ends.iter().map(|it| Parts::of(&it.record)).collect();
        let owners: Vec<&[u8]> = parts.iter().map(|it| it.owner).collect();
        let states: Vec<&str> = parts.iter().map(|it| it.state).collect();
        let refunds: Vec<i64> = ends.iter().map(|it| it.refund).collect();
        let codecs: Vec<Option<&str>> = parts.iter().map(|it| it.codec).collect();
        let results: Vec<Option<&[u8]>> = parts.iter().map(|it| it.result.as_deref()).collect();
        let sizes: Vec<Option<i64>> = parts.iter().map(|it| it.result_bytes).collect();
        let ttls: Vec<i64> = ends.iter().map(|it| sql::millis(it.ttl)).collect();
        let numbers: Vec<Option<i64>> = ends.iter().map(|it| sql::number_of(&it.record)).collect();
        let params: [&(dyn ToSql + Sync); 9] =
            [&keys, &Hidden(owners), &states, &refunds, &codecs, &Hidden(results), &sizes, &ttls, &numbers];
        let mut done = vec![false; ends.len()];
        let bytes = ends.iter().map(|it| Self::bytes(it)).sum();
        for row in &self.0.rows(&self.0.sql.end_many, &params, Effect::Records(bytes)).await? {
            if let Some(i) = row.try_get::<_, &str>(0).ok().and_then(|key| places.get(key)) {
                done[*i] = true;
            }
        }
        Ok(done)
    }
}

impl Work for Ends {
    type Operation = End;
    /// Whether it ended a pending record.
    type Answer = bool;

    const LANES: usize = 1;
    // An attempt has ended even if the caller that handed over its end is gone.
    const OUTLIVES: bool = true;

    fn database(&self) -> &Database {
        &self.0.database
    }

    fn key(end: &End) -> &str {
        end.key.as_str()
    }

    fn turn(&self) -> Option<&Semaphore> {
        Some(&self.0.turn)
    }

    fn bytes(end: &End) -> usize {
        end.key.as_str().len() + end.record.state.result().map_or(0, StoredResult::stored_bytes) + 80
    }

    async fn one(&self, end: &End) -> Result<bool, Failure> {
        let sql = &self.0.sql;
        sql.end_pending(&*self.0, end.key.as_str(), &end.record, end.refund, end.ttl).await
    }

    async fn many(&self, ends: &[Waiting<Self>]) -> Result<Vec<bool>, Failure> {
        let ends: Vec<&End> = ends.iter().map(|it| &it.operation).collect();
        let order = by_key(&ends, |it| it.key.as_str());
        let mut done = vec![false; ends.len()];
        // Of several ends of one key, each has a statement of its own: within one, it would be undefined which of them
        // counts.
        let groups: Vec<&[usize]> = order.chunk_by(|a, b| ends[*a].key == ends[*b].key).collect();
        let mut turn = 0;
        loop {
            let some: Vec<usize> = groups.iter().filter_map(|group| group.get(turn).copied()).collect();
            if some.is_empty() {
                return Ok(done);
            }
            let distinct: Vec<&End> = some.iter().map(|i| ends[*i]).collect();
            for (i, was_done) in some.iter().zip(self.distinct(&distinct).await?) {
                done[*i] = was_done;
            }
            turn += 1;
        }
    }
}

impl Common {
    /// The state of a runtime; `is_first` if it is the first one of its process.
    fn local(&self, is_upkeep: bool, connections: usize, is_first: bool) -> Local {
        let (clock, limit) = (&self.clock, self.response_timeout);
        let source = match &self.calls {
            _ if is_upkeep => self.upkeep.clone(),
            // The pool's connections end with the runtime that opened them, and in a forked process they are the parent's.
            Source::Pool(pool) if !is_first || !self.process.is_this() => Source::LikePool(pool.clone()),
            calls => calls.clone(),
        };
        let sessions = Sessions::new(source, connections, limit, Arc::clone(clock));
        let database = Database::new(sessions, Arc::clone(clock), limit, self.has_sessions);
        let database = if is_upkeep { database.for_renewals() } else { database };
        let server = Arc::new(Server { database, sql: Arc::clone(&self.sql), turn: Semaphore::new(1) });
        Local {
            reserves: Lanes::new(Reserves { server: Arc::clone(&server), replays: 0.into() }),
            ends: Lanes::new(Ends(Arc::clone(&server))),
            wakeups: Wakeups::new(self.listener.clone(), sql::channel(&self.schema), Arc::clone(clock)),
            server,
        }
    }
}

impl Shared {
    fn new(common: Arc<Common>, connections: usize, is_upkeep: bool) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            common,
            connections,
            is_upkeep,
            upkeep: OnceLock::new(),
            mine: PerProcess::default(),
        })
    }

    /// The state of the current runtime.
    fn here(&self) -> Result<Here<'_, Local>, StoreError> {
        let mine = self.mine.here();
        let make = |is_first| self.common.local(self.is_upkeep, self.connections, is_first);
        let here = mine.runtimes.here(make).ok_or_else(|| {
            let message = "a store in PostgreSQL is used inside of a tokio runtime, and there is none here";
            StoreError::new(StoreErrorKind::Misconfigured, message)
        })?;
        if let Some(interval) = self.common.purge_every
            && !self.is_upkeep
        {
            mine.purger.get_or_init(|| self.start_purger(interval));
        }
        Ok(here)
    }

    /// The same for operations that can be handed over: for a caller outside of any runtime, tasks of another one run them.
    fn lanes(&self) -> Result<Here<'_, Local>, StoreError> {
        self.here().or_else(|error| self.mine.here().runtimes.any().ok_or(error))
    }

    async fn try_reserve(&self, request: &ReserveRequest) -> Result<Reservation, StoreError> {
        for look in 0..LOOKS {
            pause(&*self.common.clock, look).await;
            let found = match self.lanes()?.reserves.call(request.clone()).await.map_err(Failure::without_result)? {
                Met::Made => {
                    return Ok(Reservation::Granted { lease: Record::first(request).lease(request), takeover: false });
                }
                Met::Found(found) => *found.map_err(corrupt)?,
                // The next statement sees the record.
                Met::Unseen => continue,
                Met::LeftOut => {
                    let here = self.here()?;
                    // Boxed, as below: most calls don't get here, but would carry its size inline.
                    match Box::pin(here.server.sql.look_at(&*here.server, request.key.as_str())).await? {
                        Some(found) => found,
                        None => continue,
                    }
                }
            };
            let (with, takeover) = if found.is_expired() {
                (Record::first(request), false)
            } else {
                match found.record.admit(request, found.lapses_in()) {
                    Admission::Answer(answer) => return Ok(answer),
                    Admission::Replace { with, takeover } => (with, takeover),
                }
            };
            let here = self.here()?;
            let replaced = Box::pin(here.server.sql.replace_met(&*here.server, request, &found, &with)).await;
            if replaced.map_err(Failure::without_result)? {
                return Ok(Reservation::Granted { lease: with.lease(request), takeover });
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, LOOKED))
    }

    /// The record of `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<Found>, StoreError> {
        let here = self.here()?;
        let found = here.server.sql.look_at(&*here.server, key.as_str()).await?;
        Ok(found.filter(|found| !found.is_expired()))
    }

    /// Turns a pending record into `state`, by compare-and-set on the attempt, or for a release on its owner token. An
    /// earlier copy of the same write is recognised.
    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Verdict, StoreError> {
        let record = Record::after(lease, state);
        for look in 0..LOOKS {
            pause(&*self.common.clock, look).await;
            let end = End { key: lease.key.clone(), record: record.clone(), refund, ttl: lease.ttl };
            if self.lanes()?.ends.call(end).await? {
                return Ok(Verdict::Applied);
            }
            let found = Box::pin(self.look(&lease.key)).await?.map(|found| found.record);
            match found {
                // Locked by another session, or made after the statement found it missing.
                Some(found)
                    if found.is_pending()
                        && found.owner == lease.owner
                        && (found.attempt == lease.attempt || !record.is_finished()) => {}
                found => {
                    return Ok(found.map_or(Verdict::Refused, |found| found.ended(lease, record.is_finished())));
                }
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, LOOKED))
    }

    /// Renews the `leases` at `places` and answers each. A lease that is not renewed is refused, unless only a lock of
    /// another session was in the way. Returns the places of these.
    async fn renew_some(
        &self,
        leases: &[Lease],
        places: &[usize],
        answer: &Answers<'_>,
    ) -> Result<Vec<usize>, StoreError> {
        let here = self.here()?;
        let Server { database, sql, .. } = &*here.server;
        let asked = Asked::new(leases, places);
        let renewed = match asked.of(database, &sql.renew, Effect::Writes).await {
            Err(failure) if failure.is_deadlock => asked.of(database, &sql.renew, Effect::Writes).await?,
            // A row was locked while the statement was under way; the next statement leaves it alone.
            Err(failure) if failure.is_locked => return Ok(places.to_vec()),
            renewed => renewed?,
        };
        let is_in = |attempts: &HashSet<Attempt>, place: usize| attempts.contains(&attempt(&leases[place]));
        let (done, rest): (Vec<usize>, Vec<usize>) = places.iter().partition(|place| is_in(&renewed, **place));
        for place in done {
            answer(place, Verdict::Applied);
        }
        if rest.is_empty() {
            return Ok(rest);
        }
        let held = Asked::new(leases, &rest).of(database, &sql.held, Effect::Reads).await?;
        let (locked, lost): (Vec<usize>, Vec<usize>) = rest.into_iter().partition(|place| is_in(&held, *place));
        for place in lost {
            answer(place, Verdict::Refused);
        }
        Ok(locked)
    }

    /// Retries the locked leases a few times: another statement of the library holds a lock for a moment at most.
    async fn renew_locked(&self, leases: &[Lease], places: &[usize], answer: &Answers<'_>) -> Result<(), StoreError> {
        let mut locked = places.to_vec();
        for look in 2..2 + RENEWED_AGAIN {
            pause(&*self.common.clock, look).await;
            locked = self.renew_some(leases, &locked, answer).await?;
            if locked.is_empty() {
                return Ok(());
            }
        }
        let message = format!("another session has locked the records of {} leases", locked.len());
        Err(StoreError::new(StoreErrorKind::Unavailable, message))
    }

    async fn purge(&self, batch: u32) -> Result<(u64, u64), StoreError> {
        let here = self.here()?;
        let rows = here.server.rows(&here.server.sql.purge, &[&i64::from(batch)], Effect::Writes).await?;
        let count = |at: usize| {
            let count: Option<i64> = rows.first().and_then(|row| row.try_get(at).ok());
            u64::try_from(count.unwrap_or_default()).unwrap_or_default()
        };
        Ok((count(0), count(1)))
    }

    /// Purges every `interval` until the returned sender is dropped. It uses the connections for upkeep, as the caller's
    /// runtime may stand still.
    fn start_purger(&self, interval: Duration) -> oneshot::Sender<()> {
        let (upkeep, clock) = (Arc::downgrade(self.upkeep_of()), Arc::clone(&self.common.clock));
        let (sender, mut over) = oneshot::channel();
        self.common.clock.spawn(Box::pin(async move {
            while race(&mut over, clock.sleep(interval)).await.is_none() {
                loop {
                    let Some(upkeep) = upkeep.upgrade() else { return };
                    match upkeep.purge(PURGED_AT_ONCE).await {
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

    /// The handle that renews leases and writes late.
    fn upkeep_of(&self) -> &Arc<Shared> {
        self.upkeep.get_or_init(|| Self::new(Arc::clone(&self.common), UPKEEP_CONNECTIONS, true))
    }
}

/// An attempt, as a row names it.
type Attempt = (String, [u8; OwnerToken::BYTES], i64);

fn attempt(lease: &Lease) -> Attempt {
    (lease.key.as_str().to_owned(), *lease.owner.as_bytes(), lease.attempt.into())
}

/// The parameters of a statement about leases.
struct Asked<'a> {
    keys: Vec<&'a str>,
    owners: Hidden<Vec<&'a [u8]>>,
    attempts: Vec<i64>,
}

impl<'a> Asked<'a> {
    fn new(leases: &'a [Lease], places: &[usize]) -> Self {
        let leases = || places.iter().map(|place| &leases[*place]);
        Self {
            keys: leases().map(|lease| lease.key.as_str()).collect(),
            owners: Hidden(leases().map(|lease| &lease.owner.as_bytes()[..]).collect()),
            attempts: leases().map(|lease| lease.attempt.into()).collect(),
        }
    }

    /// The attempts among them that the statement returns.
    async fn of(
        &self,
        database: &Database,
        statement: &Statement,
        effect: Effect,
    ) -> Result<HashSet<Attempt>, Failure> {
        let params: [&(dyn ToSql + Sync); 3] = [&self.keys, &self.owners, &self.attempts];
        let rows = database.renew(statement, &params, effect).await?;
        let answered = rows.iter().filter_map(|row| {
            let owner = row.try_get::<_, &[u8]>(1).ok()?.try_into().ok()?;
            Some((row.try_get(0).ok()?, owner, row.try_get(2).ok()?))
        });
        Ok(answered.collect())
    }
}

impl Store for Shared {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
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

    fn heartbeats(&self) -> &Heartbeats {
        &self.common.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a ReserveRequest) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease], answer: &'a Answers<'a>) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let order = by_key(leases, |lease| lease.key.as_str());
            // Two at a time keep the server busy, and leave connections to attempts that start and finish.
            let chunks: Vec<_> = order.chunks(RENEWED_AT_ONCE).collect();
            let mut halves = [0, 1].map(|half| {
                let chunks = chunks.iter().skip(half).step_by(2);
                Box::pin(async move {
                    let (mut locked, mut renewed) = (Vec::new(), Ok(()));
                    for places in chunks {
                        // A failure of some leases must not keep the others waiting.
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

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            sql::check_size(finish)?;
            self.end(lease, finish.state(), 0).await
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(self.end(lease, release.state(), i64::from(release == Release::NotStarted)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
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
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move { Ok(self.look(key).await?.map(Found::inspection)) })
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Verdict> {
        StoreFuture::new(async move {
            let here = self.here()?;
            let reopen = &here.server.sql.reopen;
            let reopened = here.server.changes(reopen, &[&key.as_str(), &i64::from(attempt)]).await?;
            Ok(if reopened { Verdict::Applied } else { Verdict::Refused })
        })
    }
}

/// Reads an untrusted row, for tests. `None`: the statement has just made the record.
///
/// # Errors
/// If the row is no record.
#[cfg(feature = "conformance")]
pub fn read_row(row: &impl Cells) -> Result<Option<Inspection>, StoreError> {
    match sql::met(row) {
        sql::Met::Made => Ok(None),
        sql::Met::Found(found) => found.map(|found| Some(found.inspection())).map_err(sql::corrupt),
        sql::Met::Unseen | sql::Met::LeftOut => Err(sql::corrupt(crate::record::format::FormatError::Damaged)),
    }
}
