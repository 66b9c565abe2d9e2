//! Records in a table of a PostgreSQL server.
//!
//! A record is one row. `INSERT … ON CONFLICT DO NOTHING` reserves a key, and the same statement reads the row that is
//! there: no replay locks a row or writes one. Whatever changes a row is one `UPDATE` that compares the owner token, and
//! every time is the server's `now()`. No transaction is open while a handler runs.

mod client;
mod lanes;
mod options;
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

use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tokio_postgres::types::ToSql;

use self::client::{Database, Effect, Failure, Hidden};
use self::lanes::{Lanes, Work};
pub use self::options::PostgresOptions;
#[cfg(feature = "conformance")]
pub use self::sql::Cells;
use self::sql::{Ask, Found, Met, Statement, Statements, corrupt};
use self::wake::Wakeups;
#[cfg(feature = "sqlx")]
pub use self::with_sqlx::InSqlx;
pub use self::within::InPostgres;
use crate::clock::all;
use crate::record::Parts;
use crate::store::forward;
use crate::{
    Finish, Heartbeats, Inspection, Key, Lease, Meeting, Owner, Payload, Record, Release, Reservation, Reserve, State,
    Store, StoreError, StoreErrorKind, StoreFuture, Within, Write,
};

/// How often a call looks again at a record that changes under its eyes. Each time another attempt has got ahead, so this
/// is a bound on what can't happen rather than on what may.
const LOOKS: usize = 1_000;
/// How many leases one statement renews: a bound on how long it keeps their rows from those that finish.
const RENEWED_AT_ONCE: usize = 500;
/// How many of the last 256 reservations, about, have to be replays for the next to look before it reserves.
const MOSTLY: u32 = 128;

/// A store in a PostgreSQL server, 12 or newer.
///
/// - *Atomicity*: the primary key decides who is first, `UPDATE`s that compare the owner token decide the rest. Each is a
///   transaction of its own.
/// - *Clock*: the server's. A clock step of the server, or a failover to one whose clock differs, moves leases and
///   retentions with it.
/// - *Durability*: the server's own. With `fsync` and `synchronous_commit` on, as they are unless somebody turned them
///   off, nothing acknowledged is lost in a crash; [`connect`](PostgresStore::connect) logs a warning otherwise. A
///   failover to a standby that is not synchronous forgets what had not reached it.
/// - *Limits*: keys of [`Key::MAX_BYTES`], results of `max_result_bytes`, in any case 1 GB. Rows are deleted by
///   [`purge`](PostgresStore::purge) only, or by [`purge_every`](PostgresOptions::purge_every).
/// - *Cost*: two statements for a first run, one for a replay or a running attempt; those of concurrent tasks leave
///   together and share one commit, a lone one never waits. A heartbeat is one statement for up to 500 leases.
///
/// The table is made by [`ensure_schema`](PostgresOptions::ensure_schema), or by migrations of your own from
/// [`schema_sql`](PostgresStore::schema_sql). Clones share the connections. They live on the tokio runtime they were made
/// on.
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
    /// libpq takes them. `sslmode=require` encrypts and checks the certificate (feature `postgres-tls`); without it
    /// nothing is encrypted. Of several hosts the one that takes writes is used. [`PostgresOptions`] has more settings.
    ///
    /// # Errors
    /// [`StoreErrorKind::Misconfigured`] for a URL that can't be read, a refused login, a server that is too old or is
    /// something else, a standby, and a table that is not there or is another version's;
    /// [`StoreErrorKind::Unavailable`] if nobody answers.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        Self::options().connect(url).await
    }

    /// Settings for a connection.
    pub fn options() -> PostgresOptions {
        PostgresOptions::default()
    }

    /// The statements that make the table in a schema of this name, for migrations of your own. They may be run again.
    ///
    /// ```
    /// # use idem_runtime::PostgresStore;
    /// assert!(PostgresStore::schema_sql("idem").contains(r#"CREATE TABLE IF NOT EXISTS "idem".records"#));
    /// ```
    pub fn schema_sql(schema: &str) -> String {
        sql::ddl(schema)
    }

    /// Records inside of your open transaction: with what else it writes, or not at all. See [`Within`].
    ///
    /// The table is that in the schema `idem`, or in another [`schema`](Within::schema). Under `REPEATABLE READ` and
    /// `SERIALIZABLE` a duplicate that meets what was committed after this transaction began ends it with an error, as
    /// any other conflict of theirs. Times count from the start of the transaction.
    ///
    /// ```no_run
    /// # async fn pay(client: &mut tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::{PostgresStore, idempotent};
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within(tx), scope = "pay")]
    /// async fn pay(tx: &tokio_postgres::Transaction<'_>, order: i64) -> Result<u64, AnyError> {
    ///     Ok(tx.execute("INSERT INTO payments (order_id) VALUES ($1)", &[&order]).await?)
    /// }
    ///
    /// let tx = client.transaction().await?;
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    pub fn within<'a>(
        tx: &'a tokio_postgres::Transaction<'a>,
    ) -> Within<InPostgres<&'a tokio_postgres::Transaction<'a>>> {
        Within(InPostgres::new(tx))
    }

    /// The same for a transaction of `sqlx`, which the body and the record share by a lock. The body must not hold it while
    /// it calls another handler in the same transaction.
    ///
    /// ```no_run
    /// # async fn pay(pool: &sqlx::PgPool) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    /// use idem_runtime::{PostgresStore, idempotent};
    /// use sqlx::{Postgres, Transaction};
    /// use tokio::sync::Mutex;
    /// type AnyError = Box<dyn std::error::Error + Send + Sync>;
    ///
    /// #[idempotent(key = "{order}", ttl = "7d", store = PostgresStore::within_sqlx(tx), scope = "pay")]
    /// async fn pay(tx: &Mutex<Transaction<'_, Postgres>>, order: i64) -> Result<u64, AnyError> {
    ///     let payment = sqlx::query("INSERT INTO payments (order_id) VALUES ($1)").bind(order);
    ///     Ok(payment.execute(&mut **tx.lock().await).await?.rows_affected())
    /// }
    ///
    /// let tx = Mutex::new(pool.begin().await?);
    /// pay(&tx, 42).await?; // An error returns from here, and the transaction is rolled back.
    /// tx.into_inner().commit().await?; // The payment and its record, or neither.
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "sqlx")]
    pub fn within_sqlx<'a, 'c>(
        tx: &'a tokio::sync::Mutex<sqlx::Transaction<'c, sqlx::Postgres>>,
    ) -> Within<InPostgres<InSqlx<'a, 'c>>> {
        Within(InPostgres::new(InSqlx(tx)))
    }

    /// Deletes expired records, looking at no more than `batch` rows, and says how many that were.
    ///
    /// One statement. Rows that somebody is writing to are left for the next time, and records that were renewed since
    /// are put off. Whether a record is purged changes nothing but the size of the table.
    ///
    /// # Errors
    /// [`StoreError`] if the server did not confirm; it may be repeated.
    pub async fn purge(&self, batch: u32) -> Result<u64, StoreError> {
        Ok(self.0.purge(batch).await?.0)
    }

    /// Waits until late writes and renewals are through; see [`Heartbeats::flush`].
    pub async fn flush(&self) {
        self.0.heartbeats.flush().await;
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
    heartbeats: Heartbeats,
    schema: Box<str>,
    server: Arc<Server>,
    reserves: Lanes<Reserves>,
    ends: Lanes<Ends>,
    wakeups: Wakeups,
    purger: OnceLock<AbortHandle>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresStore").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(purger) = self.purger.get() {
            purger.abort();
        }
    }
}

/// The connections, and what is said over them.
#[derive(Debug)]
struct Server {
    database: Database,
    sql: Statements,
    /// Held by the batch of first runs, or of their ends, that is in flight. Taking turns, each gathers what all tasks
    /// want, and their commits are half as many.
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
    /// How many of 256 reservations were replays lately.
    replays: AtomicU32,
}

/// A key as the sorted batches need it: every process locks rows in the same order, so none waits in a circle.
fn by_key<T>(operations: &[T], key: impl Fn(&T) -> &str) -> Vec<usize> {
    let mut order: Vec<usize> = (0..operations.len()).collect();
    order.sort_by(|a, b| key(&operations[*a]).cmp(key(&operations[*b])));
    order
}

impl Reserves {
    /// Whether most reservations were replays lately: then a plain look is all that most of them need.
    fn expects_replays(&self) -> bool {
        self.replays.load(Ordering::Relaxed) >= MOSTLY
    }

    /// Notes how many of `asked` reservations met a record that had finished.
    fn note(&self, replays: usize, asked: usize) {
        let before = self.replays.load(Ordering::Relaxed);
        let now = u32::try_from(256 * replays / asked.max(1)).unwrap_or(256);
        // A lone replay among first runs, or a first run among replays, says little.
        let weight = if asked > 8 { 4 } else { 8 };
        self.replays.store(((weight - 1) * before + now) / weight, Ordering::Relaxed);
    }

    /// Answers for requests with different keys, in their order.
    async fn distinct(&self, requests: &[&Reserve]) -> Result<Vec<Met>, Failure> {
        let mut met: Vec<Met> = requests.iter().map(|_| Met::Unseen).collect();
        let keys: HashMap<&str, usize> = requests.iter().enumerate().map(|(i, it)| (it.key.as_str(), i)).collect();
        let mut absent: Vec<&Reserve> = requests.to_vec();
        if self.expects_replays() {
            let keys_asked: Vec<&str> = requests.iter().map(|it| it.key.as_str()).collect();
            let rows = self.server.rows(&self.server.sql.look_many, &[&keys_asked], Effect::Reads).await?;
            for row in &rows {
                if let Some(i) = sql::key(row).and_then(|key| keys.get(key)) {
                    met[*i] = sql::met(row);
                }
            }
            absent.retain(|it| matches!(met[keys[it.key.as_str()]], Met::Unseen));
        }
        if !absent.is_empty() {
            let column = |of: fn(&Reserve) -> i64| absent.iter().map(|it| of(it)).collect::<Vec<_>>();
            let names: Vec<&str> = absent.iter().map(|it| it.key.as_str()).collect();
            let owners: Vec<&[u8]> = absent.iter().map(|it| &it.owner.as_bytes()[..]).collect();
            let fingerprints: Vec<_> = absent.iter().map(|it| fingerprint(it)).collect();
            let on_crash_fail: Vec<bool> = absent.iter().map(|it| on_crash_fail(it)).collect();
            let (leases, ttls) = (column(|it| sql::millis(it.lease)), column(|it| sql::millis(it.ttl)));
            let params: [&(dyn ToSql + Sync); 6] =
                [&names, &Hidden(owners), &Hidden(fingerprints), &on_crash_fail, &leases, &ttls];
            for row in &self.server.rows(&self.server.sql.reserve_many, &params, Effect::Writes).await? {
                if let Some(i) = sql::key(row).and_then(|key| keys.get(key)) {
                    // A record that was purged while this one was made is history.
                    if !matches!(met[*i], Met::Made) {
                        met[*i] = sql::met(row);
                    }
                }
            }
        }
        self.note(met.iter().filter(|met| is_replay(met)).count(), met.len());
        Ok(met)
    }
}

fn is_replay(met: &Met) -> bool {
    matches!(met, Met::Found(Ok(found)) if found.record.is_finished())
}

fn fingerprint(request: &Reserve) -> Option<&[u8]> {
    request.fingerprint.as_ref().map(|fingerprint| &fingerprint.as_bytes()[..])
}

fn on_crash_fail(request: &Reserve) -> bool {
    Parts::of(&Record::first(request)).on_crash_fail
}

impl Work for Reserves {
    type Operation = Reserve;
    type Answer = Met;

    const LANES: usize = 2;

    fn database(&self) -> &Database {
        &self.server.database
    }

    fn turn(&self) -> Option<&Semaphore> {
        // Replays write nothing, and keep the client busy rather than the disk.
        (!self.expects_replays()).then_some(&self.server.turn)
    }

    fn bytes(request: &Reserve) -> usize {
        request.key.as_str().len() + 80
    }

    async fn one(&self, request: &Reserve) -> Result<Met, Failure> {
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

    async fn many(&self, requests: &[Reserve]) -> Result<Vec<Met>, Failure> {
        let order = by_key(requests, |it| it.key.as_str());
        let groups: Vec<&[usize]> = order.chunk_by(|a, b| requests[*a].key == requests[*b].key).collect();
        let firsts: Vec<&Reserve> = groups.iter().map(|group| &requests[group[0]]).collect();
        let met = self.distinct(&firsts).await?;
        let mut answers: Vec<Met> = requests.iter().map(|_| Met::Unseen).collect();
        for (group, met) in groups.into_iter().zip(met) {
            for i in &group[1..] {
                answers[*i] = match &met {
                    // The first of them has it, and the others meet what it has made.
                    Met::Made => {
                        let first = &requests[group[0]];
                        Met::Found(Ok(Box::new(Found::made(Record::first(first), first.lease))))
                    }
                    met => met.clone(),
                };
            }
            answers[group[0]] = met;
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
        for row in &self.0.rows(&self.0.sql.end_many, &params, Effect::Writes).await? {
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

    fn database(&self) -> &Database {
        &self.0.database
    }

    fn turn(&self) -> Option<&Semaphore> {
        Some(&self.0.turn)
    }

    fn bytes(end: &End) -> usize {
        end.key.as_str().len() + end.record.state.payload().map_or(0, Payload::stored_bytes) + 80
    }

    async fn one(&self, end: &End) -> Result<bool, Failure> {
        let sql = &self.0.sql;
        sql.end_pending(&*self.0, end.key.as_str(), &end.record, end.refund, end.ttl).await
    }

    async fn many(&self, ends: &[End]) -> Result<Vec<bool>, Failure> {
        let order = by_key(ends, |it| it.key.as_str());
        let mut done = vec![false; ends.len()];
        // Of several ends of one key each has a statement of its own: in one, which of them counts would be anybody's guess.
        let groups: Vec<&[usize]> = order.chunk_by(|a, b| ends[*a].key == ends[*b].key).collect();
        let mut turn = 0;
        loop {
            let some: Vec<usize> = groups.iter().filter_map(|group| group.get(turn).copied()).collect();
            if some.is_empty() {
                return Ok(done);
            }
            let distinct: Vec<&End> = some.iter().map(|i| &ends[*i]).collect();
            for (i, was_done) in some.iter().zip(self.distinct(&distinct).await?) {
                done[*i] = was_done;
            }
            turn += 1;
        }
    }
}

impl Shared {
    async fn try_reserve(&self, request: &Reserve) -> Result<Reservation, StoreError> {
        for _ in 0..LOOKS {
            let found = match self.reserves.call(request.clone()).await? {
                Met::Made => {
                    return Ok(Reservation::Reserved { lease: Record::first(request).lease(request), takeover: false });
                }
                Met::Found(found) => found.map_err(corrupt)?,
                // It is there for the next statement.
                Met::Unseen => continue,
            };
            let (with, takeover) = if found.is_expired() {
                (Record::first(request), false)
            } else {
                match found.record.meet(request, found.lapses_in()) {
                    Meeting::Answer(answer) => return Ok(answer),
                    Meeting::Replace { with, takeover } => (with, takeover),
                }
            };
            if self.server.sql.replace_met(&*self.server, request, &found, &with).await? {
                return Ok(Reservation::Reserved { lease: with.lease(request), takeover });
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "the record changed each time it was looked at"))
    }

    /// What is recorded for `key`, unless it has expired.
    async fn look(&self, key: &Key) -> Result<Option<Found>, StoreError> {
        let found = self.server.sql.look_at(&*self.server, key.as_str()).await?;
        Ok(found.filter(|found| !found.is_expired()))
    }

    /// Compare-and-set on the attempt, or for a release on its owner token: a pending record becomes `state`; one that is
    /// there already is recognised.
    async fn end(&self, lease: &Lease, state: State, refund: i64) -> Result<Write, StoreError> {
        let record = Record::after(lease, state);
        for _ in 0..LOOKS {
            let end = End { key: lease.key.clone(), record: record.clone(), refund, ttl: lease.ttl };
            if self.ends.call(end).await? {
                return Ok(Write::Done);
            }
            let found = self.look(&lease.key).await?.map(|found| found.record);
            match found {
                // Made after it was found missing.
                Some(found)
                    if found.is_pending()
                        && found.owner == lease.owner
                        && (found.attempt == lease.attempt || !record.is_finished()) => {}
                found => {
                    return Ok(found.map_or(Write::Refused, |found| found.ended(lease, record.is_finished())));
                }
            }
        }
        Err(StoreError::new(StoreErrorKind::Unavailable, "the record changed each time it was looked at"))
    }

    async fn renew_some(&self, leases: &[&Lease]) -> Result<Vec<(String, [u8; Owner::BYTES], i64)>, Failure> {
        let keys: Vec<&str> = leases.iter().map(|lease| lease.key.as_str()).collect();
        let owners: Vec<&[u8]> = leases.iter().map(|lease| &lease.owner.as_bytes()[..]).collect();
        let owners = Hidden(owners);
        let attempts: Vec<i64> = leases.iter().map(|lease| lease.attempt.into()).collect();
        let params: [&(dyn ToSql + Sync); 3] = [&keys, &owners, &attempts];
        let renew = || self.server.rows(&self.server.sql.renew, &params, Effect::Writes);
        let rows = match renew().await {
            Err(failure) if failure.is_deadlock => renew().await?,
            answer => answer?,
        };
        let renewed = rows.iter().filter_map(|row| {
            let owner = row.try_get::<_, &[u8]>(1).ok()?.try_into().ok()?;
            Some((row.try_get(0).ok()?, owner, row.try_get(2).ok()?))
        });
        Ok(renewed.collect())
    }

    async fn purge(&self, batch: u32) -> Result<(u64, u64), StoreError> {
        let purge = &self.server.sql.purge;
        let rows = self.server.rows(purge, &[&i64::from(batch)], Effect::Writes).await?;
        let count = |at: usize| {
            let count: Option<i64> = rows.first().and_then(|row| row.try_get(at).ok());
            u64::try_from(count.unwrap_or_default()).unwrap_or_default()
        };
        Ok((count(0), count(1)))
    }

    /// Purges every `interval`, as long as the store lives.
    fn start_purger(&self, interval: Duration, batch: u32) {
        let (this, clock) = (Weak::clone(&self.this), Arc::clone(self.server.database.clock()));
        let task = tokio::spawn(async move {
            loop {
                clock.sleep(interval).await;
                loop {
                    let Some(this) = this.upgrade() else { return };
                    match this.purge(batch).await {
                        Ok((gone, kept)) if gone + kept >= u64::from(batch) => {}
                        Ok(_) => break,
                        Err(error) => {
                            tracing::warn!(%error, "expired records could not be purged; trying again");
                            break;
                        }
                    }
                }
            }
        });
        if let Err(task) = self.purger.set(task.abort_handle()) {
            task.abort();
        }
    }
}

impl Store for Shared {
    fn name(&self) -> &'static str {
        "postgres"
    }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().expect("alive while it is borrowed")
    }

    fn heartbeats(&self) -> &Heartbeats {
        &self.heartbeats
    }

    fn reserve<'a>(&'a self, request: &'a Reserve) -> StoreFuture<'a, Reservation> {
        StoreFuture::new(self.try_reserve(request))
    }

    fn renew<'a>(&'a self, leases: &'a [Lease]) -> StoreFuture<'a, Vec<Write>> {
        StoreFuture::new(async move {
            let order = by_key(leases, |lease| lease.key.as_str());
            let sorted: Vec<&Lease> = order.iter().map(|i| &leases[*i]).collect();
            // Two at a time keep the server busy, and leave connections to those that start and finish.
            let chunks: Vec<_> = sorted.chunks(RENEWED_AT_ONCE).collect();
            let mut halves = [0, 1].map(|half| {
                let chunks = chunks.iter().skip(half).step_by(2);
                Box::pin(async move {
                    let mut renewed = Vec::new();
                    for some in chunks {
                        renewed.extend(self.renew_some(some).await?);
                    }
                    Ok::<_, Failure>(renewed)
                })
            });
            let mut renewed = HashSet::with_capacity(leases.len());
            for half in all(&mut halves).await {
                renewed.extend(half?);
            }
            Ok(leases
                .iter()
                .map(|lease| {
                    let attempt = (lease.key.as_str().to_owned(), *lease.owner.as_bytes(), lease.attempt.into());
                    if renewed.contains(&attempt) { Write::Done } else { Write::Refused }
                })
                .collect())
        })
    }

    fn finish<'a>(&'a self, lease: &'a Lease, finish: &'a Finish) -> StoreFuture<'a, Write> {
        StoreFuture::new(async move {
            sql::check_size(finish)?;
            self.end(lease, finish.state(), 0).await
        })
    }

    fn release<'a>(&'a self, lease: &'a Lease, release: Release) -> StoreFuture<'a, Write> {
        StoreFuture::new(self.end(lease, release.state(), i64::from(release == Release::NotStarted)))
    }

    fn wait<'a>(&'a self, key: &'a Key, attempt: u32, at_most: Duration) -> StoreFuture<'a, ()> {
        StoreFuture::new(async move {
            let mark = async {
                let sql = &self.server.sql;
                let (statement, effect) =
                    if self.wakeups.listens() { (&sql.mark, Effect::Writes) } else { (&sql.is_pending, Effect::Reads) };
                let rows = self.server.rows(statement, &[&key.as_str(), &i64::from(attempt)], effect).await?;
                Ok(rows.first().and_then(|row| row.try_get(0).ok()).unwrap_or(false))
            };
            self.wakeups.wait(key.as_str(), at_most, mark).await
        })
    }

    fn inspect<'a>(&'a self, key: &'a Key) -> StoreFuture<'a, Option<Inspection>> {
        StoreFuture::new(async move { Ok(self.look(key).await?.map(Found::inspection)) })
    }

    fn reopen<'a>(&'a self, key: &'a Key, attempt: u32) -> StoreFuture<'a, Write> {
        StoreFuture::new(async move {
            let reopen = &self.server.sql.reopen;
            let reopened = self.server.changes(reopen, &[&key.as_str(), &i64::from(attempt)]).await?;
            Ok(if reopened { Write::Done } else { Write::Refused })
        })
    }
}

/// What a row that may be anybody's says; `None` if that is that the record was made just now. For tests.
///
/// # Errors
/// It is no record.
#[cfg(feature = "conformance")]
pub fn read_row(row: &impl Cells) -> Result<Option<Inspection>, StoreError> {
    match sql::met(row) {
        sql::Met::Made => Ok(None),
        sql::Met::Found(found) => found.map(|found| Some(found.inspection())).map_err(sql::corrupt),
        sql::Met::Unseen => Err(sql::corrupt(crate::record::format::FormatError::Damaged)),
    }
}
