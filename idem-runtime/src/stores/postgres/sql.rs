//! The statements, and how their rows are read: the one place that knows the table.
//!
//! Every time in a statement is the moment at which the server got it (`statement_timestamp()`), for reads and writes
//! alike. Outside of a transaction that equals `now()`. Inside one of the user's, `now()` is when the transaction began,
//! which may be before the lapse of the lease that it has to take over.
//!
//! An expired record counts as absent in every statement, whether or not it was purged. A row of another format is never
//! written to. No statement waits for a row that another session has locked: it leaves the row alone and says so.

use std::error::Error;

use bytes::Bytes;
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, ToSql, Type};

use super::client::{Effect, Hidden};
use crate::record::format::FormatError;
use crate::record::{Finish, Inspection, Parts, Record, ReserveRequest, State, StoredResult, signed_millis};
use crate::store::{StoreError, StoreErrorKind};
use std::time::Duration;

/// The default schema.
pub(super) const SCHEMA: &str = "idem";
/// The start of the comment on the table.
pub(super) const TABLE_VERSION: &str = "idem 1";
/// The longest name of a schema: the name of a channel has 63 bytes at most.
pub(super) const MAX_SCHEMA_BYTES: usize = 58;
/// The largest result: a value of PostgreSQL is smaller than 1 GiB, and so is the message that carries it.
const MAX_RESULT_BYTES: usize = 1_000_000_000;
/// A thousand years: longer than any policy allows, and far from the end of PostgreSQL's calendar.
const MAX_MILLIS: i64 = 1000 * 366 * 86_400_000;

/// The file for users that run their own migrations.
const DDL: &str = include_str!("schema.sql");

/// A name as a quoted identifier.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The statements of [`DDL`] for a schema of this name.
pub(super) fn ddl(schema: &str) -> String {
    DDL.replace("\"idem\"", &quoted(schema))
}

/// The same, safe to run from many processes at once. It is one text, so that it is one transaction.
pub(super) fn ensure(schema: &str) -> String {
    // `IF NOT EXISTS` alone looks before it creates: two processes that look at once both create.
    format!("BEGIN; SELECT pg_advisory_xact_lock(7161677463105041); {} COMMIT;", ddl(schema))
}

/// Refuses a result that no row can hold.
pub(super) fn check_size(finish: &Finish) -> Result<(), StoreError> {
    let bytes = finish.result().stored_bytes();
    if bytes > MAX_RESULT_BYTES {
        let message = format!("the result has {bytes} bytes, a row holds {MAX_RESULT_BYTES}");
        return Err(StoreError::new(StoreErrorKind::TooLarge, message));
    }
    Ok(())
}

/// The channel on which ends of attempts are published.
pub(super) fn channel(schema: &str) -> String {
    format!("idem:{schema}")
}

pub(super) fn listen(channel: &str) -> String {
    format!("LISTEN {}", quoted(channel))
}

/// Milliseconds as a parameter.
pub(super) fn millis(duration: Duration) -> i64 {
    signed_millis(duration).min(MAX_MILLIS)
}

/// A statement and the types of its parameters.
#[derive(Debug)]
pub struct Statement {
    /// Its index among all statements.
    pub(super) place: usize,
    pub(super) text: String,
    pub(super) types: &'static [Type],
}

/// All statements about records.
#[derive(Debug)]
pub(super) struct Statements {
    /// `key`: its record, if there is one.
    pub(super) look: Statement,
    /// `keys`: their records, without results of more than [`IN_A_BATCH`] bytes.
    pub(super) look_many: Statement,
    /// The columns of [`RESERVE`]: makes a record, or finds the existing one.
    pub(super) reserve: Statement,
    /// The same for arrays of them, without results of more than [`IN_A_BATCH`] bytes.
    pub(super) reserve_many: Statement,
    /// The columns of [`RESERVE`] and the number of a lock: the same inside the user's transaction, unless another
    /// transaction holds the key. Always one row; see [`Within`].
    pub(super) reserve_within: Statement,
    /// Replaces a record by that of a new attempt, if it is still the one that was met.
    pub(super) replace: Statement,
    /// The columns of [`END`]: ends an attempt.
    pub(super) end: Statement,
    /// The same for arrays of them.
    pub(super) end_many: Statement,
    /// `keys, owners, attempts`: renews leases.
    pub(super) renew: Statement,
    /// The same: the leases whose renewal was prevented only by a lock on their row.
    pub(super) held: Statement,
    /// `key, attempt`: marks the row, so that the end of the attempt is published. Answers whether it is pending, and
    /// whether it is marked.
    pub(super) mark: Statement,
    /// `key, attempt`: whether the attempt is pending.
    pub(super) is_pending: Statement,
    /// `key, attempt`: lets the next delivery run again.
    pub(super) reopen: Statement,
    /// `how many`: deletes expired rows, and lists renewed ones for later; answers how many of each.
    pub(super) purge: Statement,
    /// The lock timeout of this session.
    pub(super) lock_timeout: Statement,
    /// The name of the schema: what the server is, and what the table is.
    pub(super) check: Statement,
}

/// A statement that reads many records leaves out results of more bytes than this, so that its answer has a bound. Each
/// result left out is read alone.
const IN_A_BATCH: usize = 4096;
/// The columns that a row is read from, in this order.
const RECORD: &str = "r.format, r.state, r.owner, r.attempt, r.starts, r.fingerprint, r.on_crash_fail, r.lease_ms, \
                      r.ttl_ms, r.codec, r.result, r.result_bytes, r.lapses_at, r.expires_at, statement_timestamp()";
/// The same for a record that was just made.
const MADE: &str = "NULL::smallint, NULL::text, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bytea, NULL::boolean, \
                    NULL::bigint, NULL::bigint, NULL::text, NULL::bytea, NULL::bigint, NULL::timestamptz, \
                    NULL::timestamptz, NULL::timestamptz";
/// The index of the key, where it follows [`RECORD`].
const KEY_AT: usize = 15;
/// In a statement that reads many records, the index of whether the result was left out.
const LEFT_OUT_AT: usize = 16;

/// The parameters of a reservation.
const RESERVE: [Type; 6] = [Type::TEXT, Type::BYTEA, Type::BYTEA, Type::BOOL, Type::INT8, Type::INT8];
const RESERVE_WITHIN: [Type; 7] =
    [Type::TEXT, Type::BYTEA, Type::BYTEA, Type::BOOL, Type::INT8, Type::INT8, Type::INT8];
const RESERVE_MANY: [Type; 6] =
    [Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::BYTEA_ARRAY, Type::BOOL_ARRAY, Type::INT8_ARRAY, Type::INT8_ARRAY];
/// The parameters of the end of an attempt.
const END: [Type; 9] =
    [Type::TEXT, Type::BYTEA, Type::TEXT, Type::INT8, Type::TEXT, Type::BYTEA, Type::INT8, Type::INT8, Type::INT8];
const END_MANY: [Type; 9] = [
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::TEXT_ARRAY,
    Type::INT8_ARRAY,
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
];
const REPLACE: [Type; 12] = [
    Type::TEXT,
    Type::BYTEA,
    Type::BYTEA,
    Type::BOOL,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::INT8,
    Type::BYTEA,
    Type::INT8,
    Type::TEXT,
    Type::BOOL,
];

impl Statements {
    /// The statements for the table in `schema`.
    #[expect(clippy::too_many_lines, reason = "one list, to be read together")]
    pub(super) fn new(schema: &str) -> Self {
        let table = format!("{}.records", quoted(schema));
        let channel = channel(schema).replace('\'', "''");
        let ms = |ms: &str| format!("({ms}) * interval '1 millisecond'");
        let now = "statement_timestamp()";
        let asked = "(key, owner, fingerprint, on_crash_fail, lease_ms, ttl_ms)";
        let make = |from: &str| {
            format!(
                "INSERT INTO {table} AS r (key, owner, fingerprint, on_crash_fail, lease_ms, ttl_ms, format, state, attempt, \
                 starts, lapses_at, expires_at, listed_at) \
                 SELECT u.key, u.owner, u.fingerprint, u.on_crash_fail, u.lease_ms, u.ttl_ms, {VERSION}, 'P', 1, 1, \
                 {now} + {}, {now} + {}, {now} + {} FROM {from} AS u {asked} \
                 ON CONFLICT (key) DO NOTHING RETURNING r.key",
                ms("u.lease_ms"),
                ms("u.lease_ms + u.ttl_ms"),
                ms("u.ttl_ms"),
            )
        };
        // A waiter has marked the row, so that an end without waiters takes no lock at its commit.
        let wake = format!("CASE WHEN r.waited THEN pg_notify('{channel}', r.key) END");
        let there = format!("r.format = {VERSION} AND r.expires_at > {now}");
        // A row that another session has locked, for a moment or in a forgotten `psql`, must not hold up the others in the
        // statement, nor the connection. A row whose `xmax` is zero was never locked since it was written. Any other row is
        // locked for this statement first, unless another session holds it.
        let free = |asked: &str| {
            format!(
                "(r.xmax = '0'::xid OR r.ctid = ANY (ARRAY(SELECT f.ctid FROM {asked} JOIN {table} AS f ON f.key = a.key \
                 WHERE f.xmax <> '0'::xid FOR NO KEY UPDATE OF f SKIP LOCKED)))"
            )
        };
        let (free_one, free_many) = (free("(VALUES ($1)) AS a (key)"), free("unnest($1) AS a (key)"));
        // A release passes no attempt number.
        let end = |from: &str, free: &str| {
            format!(
                "UPDATE {table} AS r SET state = u.state, starts = greatest(r.starts - u.refund, 0), \
                 on_crash_fail = false, lease_ms = NULL, ttl_ms = NULL, codec = u.codec, result = u.result, \
                 result_bytes = u.result_bytes, lapses_at = {now}, expires_at = {now} + {ttl}, \
                 listed_at = least(r.listed_at, {now} + {ttl}) FROM {from} \
                 AS u (key, owner, state, refund, codec, result, result_bytes, ttl_ms, attempt) \
                 WHERE r.key = u.key AND r.owner = u.owner AND r.attempt = coalesce(u.attempt, r.attempt) \
                 AND r.state = 'P' AND {there} AND {free} RETURNING r.key, {wake}",
                ttl = ms("u.ttl_ms"),
            )
        };
        let look = format!("SELECT {RECORD} FROM {table} AS r WHERE r.key = $1");
        let is_large = format!("octet_length(r.result) > {IN_A_BATCH}");
        let bounded = RECORD.replace("r.result,", &format!("CASE WHEN {is_large} THEN NULL ELSE r.result END,"));
        let look_many = format!("SELECT {bounded}, r.key, {is_large} FROM {table} AS r WHERE r.key = ANY($1)");
        let reserve = format!(
            "WITH made AS ({}) SELECT {RECORD} FROM {table} AS r WHERE r.key = $1 \
             UNION ALL SELECT {MADE} FROM made",
            make("(VALUES ($1, $2, $3, $4, $5, $6))"),
        );
        let reserve_many = format!(
            "WITH made AS ({}) SELECT {bounded}, r.key, {is_large} FROM {table} AS r WHERE r.key = ANY($1) \
             UNION ALL SELECT {MADE}, made.key, false FROM made",
            make("unnest($1, $2, $3, $4, $5, $6)"),
        );
        // The lock, and not the row, tells whether another transaction is using the key: its row is invisible, and can't be
        // waited for with a time limit. The lock ends with its transaction.
        let reserve_within = format!(
            "WITH held AS MATERIALIZED (SELECT pg_try_advisory_xact_lock($7) AS is_held), made AS ({}) \
             SELECT {RECORD}, made.key IS NOT NULL, held.is_held \
             FROM held LEFT JOIN made ON true LEFT JOIN {table} AS r ON r.key = $1",
            make("(SELECT $1, $2, $3, $4, $5, $6 FROM held WHERE held.is_held)"),
        );
        let replace = format!(
            "UPDATE {table} AS r SET owner = $2, fingerprint = $3, on_crash_fail = $4, lease_ms = $5, ttl_ms = $6, \
             attempt = $7, starts = $8, state = 'P', codec = NULL, result = NULL, result_bytes = NULL, \
             lapses_at = {now} + {}, expires_at = {now} + {}, listed_at = least(r.listed_at, {now} + {}) \
             WHERE r.key = $1 AND r.format = {VERSION} AND r.owner = $9 AND r.attempt = $10 AND r.state = $11 AND \
             CASE WHEN $12 THEN r.expires_at <= {now} \
             ELSE r.expires_at > {now} AND (r.state <> 'P' OR r.lapses_at <= {now}) END AND {free_one} RETURNING {wake}",
            ms("$5"),
            ms("$5 + $6"),
            ms("$6"),
        );
        let held =
            format!("r.key = u.key AND r.owner = u.owner AND r.attempt = u.attempt AND r.state = 'P' AND {there}");
        // A renewal that a later one has overtaken must not shorten the lease.
        let renew = format!(
            "UPDATE {table} AS r SET lapses_at = greatest(r.lapses_at, {now} + {}), \
             expires_at = greatest(r.expires_at, {now} + {}) FROM unnest($1, $2, $3) AS u (key, owner, attempt) \
             WHERE {held} AND {free_many} RETURNING r.key, r.owner, r.attempt",
            ms("r.lease_ms"),
            ms("r.lease_ms + r.ttl_ms"),
        );
        let held = format!(
            "SELECT r.key, r.owner, r.attempt FROM unnest($1, $2, $3) AS u (key, owner, attempt) \
             JOIN {table} AS r ON {held}"
        );
        let pending = format!("r.key = $1 AND r.attempt = $2 AND r.state = 'P' AND {there}");
        let mark = format!(
            "WITH marked AS \
             (UPDATE {table} AS r SET waited = true WHERE {pending} AND NOT r.waited AND {free_one} RETURNING 1) \
             SELECT EXISTS (SELECT FROM {table} AS r WHERE {pending}), EXISTS (SELECT FROM marked) \
             OR EXISTS (SELECT FROM {table} AS r WHERE {pending} AND r.waited)"
        );
        let is_pending = format!("SELECT EXISTS (SELECT FROM {table} AS r WHERE {pending})");
        let reopen = format!(
            "UPDATE {table} AS r SET state = 'R', starts = 0, on_crash_fail = false, lease_ms = NULL, ttl_ms = NULL, \
             codec = NULL, result = NULL, result_bytes = NULL \
             WHERE r.key = $1 AND r.attempt = $2 AND {there} AND (r.state <> 'P' OR r.lapses_at <= {now}) \
             RETURNING {wake}"
        );
        // Rows that another session is writing are left for the next time, so that a purge never waits.
        let purge = format!(
            "WITH due AS MATERIALIZED (SELECT r.key FROM {table} AS r WHERE r.listed_at <= {now} AND r.format = {VERSION} \
             ORDER BY r.listed_at LIMIT $1 FOR UPDATE SKIP LOCKED), \
             gone AS (DELETE FROM {table} AS r USING due WHERE r.key = due.key AND r.expires_at <= {now} RETURNING 1), \
             kept AS (UPDATE {table} AS r SET listed_at = r.expires_at FROM due \
             WHERE r.key = due.key AND r.expires_at > {now} RETURNING 1) \
             SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM kept)"
        );
        // By joins, under one snapshot: `to_regclass` sees a table committed since, whose comment would be missing.
        let check = "SELECT version(), current_setting('server_version_num')::bigint, current_setting('server_encoding'), \
                     pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', \
                     current_setting('fsync') = 'on' AND current_setting('synchronous_commit') <> 'off', \
                     c.oid IS NOT NULL, d.description, has_schema_privilege(n.oid, 'USAGE') \
                     AND has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') \
                     AND has_table_privilege(c.oid, 'UPDATE') FROM (VALUES (1)) AS one \
                     LEFT JOIN (pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n \
                     ON n.oid = c.relnamespace AND n.nspname = $1 AND c.relname = 'records') ON true \
                     LEFT JOIN pg_catalog.pg_description AS d \
                     ON d.objoid = c.oid AND d.classoid = 'pg_catalog.pg_class'::regclass AND d.objsubid = 0";
        let mut place = 0;
        let mut statement = |text: String, types: &'static [Type]| {
            place += 1;
            Statement { place: place - 1, text, types }
        };
        let by_attempt: &[Type] = &[Type::TEXT, Type::INT8];
        Self {
            look: statement(look, &[Type::TEXT]),
            look_many: statement(look_many, &[Type::TEXT_ARRAY]),
            reserve: statement(reserve, &RESERVE),
            reserve_many: statement(reserve_many, &RESERVE_MANY),
            reserve_within: statement(reserve_within, &RESERVE_WITHIN),
            replace: statement(replace, &REPLACE),
            end: statement(end("(VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9))", &free_one), &END),
            end_many: statement(end("unnest($1, $2, $3, $4, $5, $6, $7, $8, $9)", &free_many), &END_MANY),
            renew: statement(renew, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY]),
            held: statement(held, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY]),
            mark: statement(mark, by_attempt),
            is_pending: statement(is_pending, by_attempt),
            reopen: statement(reopen, by_attempt),
            purge: statement(purge, &[Type::INT8]),
            lock_timeout: statement("SELECT current_setting('lock_timeout')".to_owned(), &[]),
            check: statement(check.to_owned(), &[Type::TEXT]),
        }
    }
}

const VERSION: i64 = Parts::VERSION;

/// Where statements run: over the pool, each by itself, or inside the user's transaction.
pub(super) trait Ask {
    type Row: Cells;
    type Error;

    /// The rows that `statement` returns.
    fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> impl Future<Output = Result<Vec<Self::Row>, Self::Error>>;
}

impl Statements {
    /// The record of `key`, expired or not.
    pub(super) async fn look_at<A: Ask>(&self, at: &A, key: &str) -> Result<Option<Found>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        match at.rows(&self.look, &[&key], Effect::Reads).await?.first().map(met) {
            Some(Met::Found(found)) => Ok(Some(*found.map_err(corrupt)?)),
            Some(Met::Made | Met::Unseen | Met::LeftOut) => Err(corrupt(FormatError::Damaged)),
            None => Ok(None),
        }
    }

    /// Replaces the record `met`, if it is still unchanged. Returns whether it was.
    pub(super) async fn replace_met<A: Ask>(
        &self,
        at: &A,
        request: &ReserveRequest,
        met: &Found,
        with: &Record,
    ) -> Result<bool, A::Error> {
        let (parts, seen) = (Parts::of(with), Parts::of(&met.record));
        let params: [&(dyn ToSql + Sync); 12] = [
            &request.key.as_str(),
            &Hidden(parts.owner),
            &Hidden(parts.fingerprint),
            &parts.on_crash_fail,
            &millis(request.lease),
            &millis(request.ttl),
            &parts.attempt,
            &parts.starts,
            &Hidden(seen.owner),
            &seen.attempt,
            &seen.state,
            &met.is_expired(),
        ];
        Ok(!at.rows(&self.replace, &params, Effect::Writes).await?.is_empty())
    }

    /// Ends the attempt that `record` names, if it is pending. Returns whether it was.
    pub(super) async fn end_pending<A: Ask>(
        &self,
        at: &A,
        key: &str,
        record: &Record,
        refund: i64,
        ttl: Duration,
    ) -> Result<bool, A::Error> {
        let parts = Parts::of(record);
        let params: [&(dyn ToSql + Sync); 9] = [
            &key,
            &Hidden(parts.owner),
            &parts.state,
            &refund,
            &parts.codec,
            &Hidden(parts.result.as_deref()),
            &parts.result_bytes,
            &millis(ttl),
            &number_of(record),
        ];
        let effect = Effect::Records(record.state.result().map_or(0, StoredResult::stored_bytes));
        Ok(!at.rows(&self.end, &params, effect).await?.is_empty())
    }
}

/// The attempt number to compare; `None` for a release, which may not know it.
pub(super) fn number_of(record: &Record) -> Option<i64> {
    record.is_finished().then_some(record.attempt.into())
}

/// The error for a row that is no record.
pub(super) fn corrupt(error: FormatError) -> StoreError {
    StoreError::new(StoreErrorKind::Corrupt, error.to_string()).with_source(error)
}

/// A point on the server's clock, in microseconds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Micros(pub(super) i64);

impl Micros {
    fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or_default())
    }
}

impl<'a> FromSql<'a> for Micros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

/// A record as a statement found it, expired or not.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) record: Record,
    pub(super) lapses_at: Micros,
    pub(super) expires_at: Micros,
    /// The server's clock when it was found.
    pub(super) now: Micros,
}

impl Found {
    pub(super) fn is_expired(&self) -> bool {
        self.expires_at <= self.now
    }

    pub(super) fn expires_in(&self) -> Duration {
        self.expires_at.since(self.now)
    }

    /// Zero if it has lapsed, or is not pending.
    pub(super) fn lapses_in(&self) -> Duration {
        match self.record.state {
            State::Pending { .. } => self.lapses_at.since(self.now),
            _ => Duration::ZERO,
        }
    }

    pub(super) fn inspection(self) -> Inspection {
        let lapses_in = matches!(self.record.state, State::Pending { .. }).then(|| self.lapses_in());
        Inspection { expires_in: self.expires_in(), lapses_in, record: self.record }
    }

    /// The record of a reservation that was just made, as the other requests for the key meet it.
    pub(super) fn made(record: Record, lease: Duration) -> Self {
        let (lapses_at, expires_at) = (Micros(millis(lease).saturating_mul(1000).max(1)), Micros(i64::MAX));
        Self { record, lapses_at, expires_at, now: Micros(0) }
    }
}

/// The answer of a statement that reserves or looks, about one key.
#[derive(Clone, Debug)]
pub(super) enum Met {
    /// The record was made by this statement.
    Made,
    /// There is a record, or a row that is no record.
    Found(Result<Box<Found>, FormatError>),
    /// Another session made a record that this statement could not see yet.
    Unseen,
    /// There is a record, but its result was left out.
    LeftOut,
}

/// The key in a row, where it follows [`RECORD`].
pub(super) fn key(row: &Row) -> Option<&str> {
    row.try_get(KEY_AT).ok()
}

/// Reads a row of a statement that reads many records.
pub(super) fn met_in_a_batch(row: &Row) -> Met {
    match row.try_get::<_, Option<bool>>(LEFT_OUT_AT) {
        Ok(Some(true)) => Met::LeftOut,
        _ => met(row),
    }
}

fn is_null<'a, T: FromSql<'a>>(row: &'a impl Cells, at: usize) -> bool {
    matches!(row.cell::<Option<T>>(at), Ok(None))
}

/// Reads a row.
pub(super) fn met(row: &impl Cells) -> Met {
    match row.cell::<Option<i16>>(0) {
        // A row of a record that was just made is all nulls. A row that lacks only the format is damaged.
        Ok(None) if is_null::<&str>(row, 1) && is_null::<&[u8]>(row, 2) => Met::Made,
        Ok(Some(format)) => Met::Found(found(row, format).map(Box::new)),
        _ => Met::Found(Err(FormatError::Damaged)),
    }
}

/// The values in a row, of any driver.
pub trait Cells {
    /// The value in the column `at`.
    ///
    /// # Errors
    /// If there is no value, or one of another type.
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError>;
}

impl Cells for Row {
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError> {
        self.try_get(at).map_err(|_| FormatError::Damaged)
    }
}

/// The answer of [`Statements::reserve_within`].
pub(super) struct Within {
    /// Whether this transaction holds the key.
    pub(super) is_held: bool,
    pub(super) met: Met,
}

/// Reads a row of [`Statements::reserve_within`].
pub(super) fn within(row: &impl Cells) -> Result<Within, FormatError> {
    let (is_made, is_held): (bool, bool) = (row.cell(KEY_AT)?, row.cell(KEY_AT + 1)?);
    let met = match met(row) {
        Met::Made if !is_made => Met::Unseen,
        met => met,
    };
    Ok(Within { is_held, met })
}

fn found(row: &impl Cells, format: i16) -> Result<Found, FormatError> {
    let parts = parts(row, format)?;
    let time = |at: usize| row.cell::<Micros>(at);
    Ok(Found { record: parts.record()?, lapses_at: time(12)?, expires_at: time(13)?, now: time(14)? })
}

fn parts(row: &impl Cells, format: i16) -> Result<Parts<'_>, FormatError> {
    Ok(Parts {
        format: format.into(),
        state: row.cell(1)?,
        owner: row.cell(2)?,
        attempt: row.cell(3)?,
        starts: row.cell(4)?,
        fingerprint: row.cell(5)?,
        on_crash_fail: row.cell(6)?,
        lease_ms: row.cell(7)?,
        ttl_ms: row.cell(8)?,
        codec: row.cell(9)?,
        result: row.cell::<Option<&[u8]>>(10)?.map(Bytes::copy_from_slice),
        result_bytes: row.cell(11)?,
    })
}
