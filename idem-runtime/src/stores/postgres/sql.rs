//! The statements, and the reading of their rows. No other file depends on the columns of the table.
//!
//! The time of a statement is the moment at which the server received the statement (`statement_timestamp()`), for
//! reads and writes alike. Outside of a transaction this time equals `now()`. Inside of a user's transaction, `now()`
//! is the start of the transaction: a lease that lapsed later would still seem to hold, and could not be taken over.
//!
//! Every statement treats an expired record as absent, whether or not it was purged. No statement writes to a row of
//! another format. Except for `hold`, no statement waits for a row that another session has locked, nor for a record
//! that a user's transaction has not committed yet: the statement skips such a key, and its answer shows that the key
//! was skipped.

use std::error::Error;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, to_sql_checked};

use super::param::HiddenParam;
use crate::codec::CodecName;
use crate::kit::rows::{FoundRow, Micros, corrupt, millis, number_of, stored_length};
use crate::kit::work::Effect;
use crate::record::envelope::{MESSAGES_CODEC, MESSAGES_START};
use crate::record::format::FormatError;
use crate::record::{
    Action, Decision, DecisionAnswer, Inspection, Journal, Parts, ReadExtent, Record, ReserveRequest, Ruling,
    StoredResult,
};
use crate::store::{Cursor, Filter, Page, Standing, StoreError, StoreErrorKind};

/// Default schema.
pub(super) const SCHEMA: &str = "idem";
/// Version of the table. The comment on the table begins with this text.
pub(super) const TABLE_VERSION: &str = "idem 1";
/// Longest name of a schema, in bytes: the name of a channel is `idem:` and the schema, and has 63 bytes at most.
pub(super) const MAX_SCHEMA_BYTES: usize = 58;
/// Largest result or journal, in bytes. PostgreSQL limits a value, and the message that carries it, to less than 1 GiB.
const MAX_RESULT_BYTES: usize = 1_000_000_000;
/// Statements that create the table, also for users who run their own migrations.
const DDL: &str = include_str!("schema.sql");

/// Returns a name as a quoted identifier.
fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// Largest number of hash partitions. Each statement locks all partitions, and the server's memory for locks is
/// limited.
pub(super) const MAX_PARTITIONS: u16 = 128;
/// The storage parameters in [`DDL`]. A partitioned table takes no storage parameters, but its partitions do.
const STORAGE: &str = " WITH (fillfactor = 30)";

/// Returns the statements of [`DDL`] for a schema of this name, and a table with this number of hash partitions (0: a
/// plain table).
pub(super) fn ddl(schema: &str, partitions: u16) -> String {
    let ddl = match partitions {
        0 => DDL.to_owned(),
        partitions => {
            let partition = |n| {
                format!(
                    "CREATE TABLE IF NOT EXISTS \"idem\".records_{n} PARTITION OF \"idem\".records\n    \
                     FOR VALUES WITH (MODULUS {partitions}, REMAINDER {n}){STORAGE};\n"
                )
            };
            let created: String = (0..partitions).map(partition).collect();
            // The partitions are created after the choice of a compression, because a partition inherits the present
            // compression of its table.
            DDL.replace(&format!("{STORAGE};\n"), " PARTITION BY HASH (key);\n").replacen(
                "CREATE INDEX",
                &format!("{created}\nCREATE INDEX"),
                1,
            )
        }
    };
    let name = quoted(schema);
    let mut text = String::new();
    for (n, part) in ddl.split("\"idem\"").enumerate() {
        if n > 0 {
            // In a text that is nested in another text, a quote is written as four quotes.
            let is_in_text = text.ends_with("''") || text.ends_with("''ALTER TABLE ");
            text += &if is_in_text { name.replace('\'', "''''") } else { name.clone() };
        }
        text += part;
    }
    text
}

/// Returns the statements of [`ddl`], safe to run from many processes simultaneously. All statements are one text, so
/// that the server runs them in one transaction.
pub(super) fn ensure(schema: &str, partitions: u16) -> String {
    // `IF NOT EXISTS` alone does not suffice: if two processes check at the same time, both try to create the table,
    // and one of them fails. The lock makes these processes wait for each other, without the time limit of the
    // statements about records.
    format!(
        "BEGIN; SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock(7161677463105041); {} COMMIT;",
        ddl(schema, partitions)
    )
}

/// Refuses a result that no row can hold.
pub(super) fn check_size(result: &StoredResult) -> Result<(), StoreError> {
    check_bytes("result", result.stored_bytes())
}

/// Refuses a journal that no row can hold.
pub(super) fn check_journal(journal: &Journal) -> Result<(), StoreError> {
    check_bytes("journal", journal.bytes().len())
}

/// Checks that a row can hold the result or the journal of `decision`.
pub(super) fn check_decision(decision: &Decision) -> Result<(), StoreError> {
    match &decision.action {
        Action::ReopenWith(Some(journal)) => check_journal(journal),
        _ => decision.result().map_or(Ok(()), check_size),
    }
}

fn check_bytes(value: &str, bytes: usize) -> Result<(), StoreError> {
    if bytes > MAX_RESULT_BYTES {
        let message = format!("the {value} has {bytes} bytes, a row holds {MAX_RESULT_BYTES}");
        return Err(StoreError::new(StoreErrorKind::TooLarge, message));
    }
    Ok(())
}

/// Returns the channel on which ends of attempts are published.
pub(super) fn channel(schema: &str) -> String {
    format!("idem:{schema}")
}

pub(super) fn listen(channel: &str) -> String {
    format!("LISTEN {}", quoted(channel))
}

/// Returns the seed of the hash that turns keys into numbers of advisory locks. Each schema has its own seed, so that
/// two schemas share no locks.
fn lock_seed(schema: &str) -> i64 {
    i64::from_be_bytes(*Sha256::digest(schema).first_chunk().expect("a digest is longer"))
}

/// A statement and the types of its parameters.
#[derive(Debug)]
pub struct Statement {
    /// Index of this statement among all statements.
    pub(super) place: usize,
    pub(super) text: String,
    pub(super) types: &'static [Type],
}

/// All statements about records. The comment on a statement names its parameters.
#[derive(Debug)]
pub(super) struct Statements {
    /// Returns the record of the key, if there is a record. Parameters: `key`.
    pub(super) look: Statement,
    /// Returns the columns that answer a reservation, if there is a record. Parameters: `key`.
    pub(super) answer: Statement,
    /// Returns the records of the keys, without results and journals of more than [`IN_A_BATCH`] bytes. Parameters:
    /// `keys`.
    pub(super) look_many: Statement,
    /// Makes a record, or returns the existing record. Parameters: [`RESERVE`].
    pub(super) reserve: Statement,
    /// Works like `reserve`, without results and journals of more than [`IN_A_BATCH`] bytes. Parameters: arrays of
    /// [`RESERVE`].
    pub(super) reserve_many: Statement,
    /// Works like `reserve` inside the user's transaction, unless another transaction holds the key. The statement
    /// always returns one row; see [`WithinAnswer`]. Parameters: [`RESERVE`].
    pub(super) reserve_within: Statement,
    /// Replaces a record by the record of a new attempt, if the replaced record is unchanged since it was read. The
    /// journal stays, unless the replaced record has expired. Parameters: [`REPLACE`].
    pub(super) replace: Statement,
    /// Ends an attempt. A release keeps the journal, a result replaces it. Parameters: [`END`].
    pub(super) end: Statement,
    /// Ends many attempts. Parameters: arrays of [`END`].
    pub(super) end_many: Statement,
    /// Renews leases. Returns the indexes of the renewed leases, counted from 1. Parameters:
    /// `keys`, `owners`, `attempts`.
    pub(super) renew: Statement,
    /// Renews leases, and notes that the bodies of the attempts begin. Parameters: as for `renew`.
    pub(super) begin: Statement,
    /// Renews leases, and puts a journal into the record of each, unless the record has a journal of the same length or
    /// a longer one. Returns the indexes of the renewed leases, counted from 1. Parameters: as for `renew`, then
    /// `journals`. No attempt occurs twice.
    pub(super) append_many: Statement,
    /// Like `append_many`, for one journal, of which the server then makes no copy.
    pub(super) append: Statement,
    /// Returns the indexes of the leases that their attempts still hold. If such a lease was not renewed, another
    /// session had locked its row. Parameters: as for `renew`.
    pub(super) held: Statement,
    /// Marks the row as awaited, so that the end of the attempt is published. Returns whether the attempt is pending,
    /// and whether the row is marked. Parameters: `key`, `attempt`.
    pub(super) mark: Statement,
    /// Returns whether the attempt is pending. Parameters: `key`, `attempt`.
    pub(super) is_pending: Statement,
    /// Replaces a record by an operator's decision, if the record is unchanged since it was
    /// read. Parameters: [`DECIDE`].
    pub(super) decide: Statement,
    /// Removes the messages from finished records, and keeps their results, without a look at either. Returns the
    /// indexes of the records that had messages and a stored result, counted from 1. Parameters: `keys`, the first
    /// halves of `owners`, `attempts`, `states`.
    pub(super) sent: Statement,
    /// Removes a record, if the record is unchanged since it was read. Parameters: [`FORGET`].
    pub(super) forget: Statement,
    /// Returns the row of the key, and a digest of all columns. Parameters: `key`.
    pub(super) examine: Statement,
    /// Removes the row if it still has this digest. Parameters: `key`, `digest`.
    pub(super) forget_damaged: Statement,
    /// Deletes expired rows whose `listed_at` is `from` or later, and moves the `listed_at` of renewed rows.
    /// Returns the number of deleted and of moved rows, and the last `listed_at` that the statement reached.
    /// Parameters: `limit`, `from`.
    pub(super) purge: Statement,
    /// Returns the records in a range of keys, and a last row with the last key and the number of rows that were
    /// read. Parameters: [`LIST`].
    pub(super) list: Statement,
    /// Like `list`, for records that wait for a decision. Parameters: [`LIST`].
    pub(super) list_undecided: Statement,
    /// Returns whether the server is read-only, and the rights to the table that the login lacks. Fails if the table or
    /// a column is missing.
    pub(super) ping: Statement,
    /// Returns the lock timeout of this session.
    pub(super) lock_timeout: Statement,
    /// Waits until no other transaction holds the key, then holds the key until the present transaction
    /// ends. Parameters: `key`.
    pub(super) hold: Statement,
    /// Returns properties of the server and of the table. Parameters: the name of the schema.
    pub(super) check: Statement,
}

/// Size of a result or of a journal, in bytes, above which a statement that reads many records leaves it out, to limit
/// the size of its answer. A separate statement then reads each such record.
const IN_A_BATCH: usize = 4096;
/// Columns that answer a reservation, in this order.
const ANSWER: &str = "r.format, r.state, r.owner, r.attempt, r.attempts_used, r.fingerprint, r.on_crash_fail, r.lease_ms, \
                      r.ttl_ms, r.codec, r.result, r.result_bytes, r.lapses_at, r.expires_at, statement_timestamp(), \
                      r.began_at, r.traceparent, r.decided_by, r.decided_reason, r.begun";
/// Nulls in place of the columns of [`ANSWER`], for a record that the statement made.
const MADE: &str = "NULL::smallint, NULL::text, NULL::bytea, NULL::bigint, NULL::bigint, NULL::bytea, NULL::boolean, \
                    NULL::bigint, NULL::bigint, NULL::text, NULL::bytea, NULL::bigint, NULL::timestamptz, \
                    NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::text, NULL::text, NULL::text, NULL::boolean";
/// Columns that follow [`ANSWER`] in a statement for an operator. Replays don't need these columns.
const REST: &str = "r.holder, r.first_seen_at";
/// The columns of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Columns {
    /// The columns of [`ANSWER`].
    Answer,
    /// The columns of [`ANSWER`] and [`REST`].
    All,
}

/// Index of the first column of [`REST`].
const REST_AT: usize = 20;
/// Index of the key in a row where the key follows [`ANSWER`].
const KEY_OF_MANY_AT: usize = 20;
/// Index of the flag for a result or journal that was left out, in a statement that reads many records.
const LEFT_OUT_AT: usize = 21;
/// Index of the key in a row where the key follows [`ANSWER`] and [`REST`].
const KEY_AT: usize = 22;
/// Index of the digest in a row where the digest follows [`ANSWER`] and [`REST`].
const DIGEST_AT: usize = 22;
/// Index of the size of a result in a row of a list. In the last row, this column holds the number of rows that were
/// read.
const SIZE_AT: usize = 23;

/// Parameters of a reservation.
const RESERVE: [Type; 8] =
    [Type::TEXT, Type::BYTEA, Type::BYTEA, Type::BOOL, Type::INT8, Type::INT8, Type::TEXT, Type::TEXT];
const RESERVE_MANY: [Type; 8] = [
    Type::TEXT_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BYTEA_ARRAY,
    Type::BOOL_ARRAY,
    Type::INT8_ARRAY,
    Type::INT8_ARRAY,
    Type::TEXT_ARRAY,
    Type::TEXT_ARRAY,
];
/// Parameters of the end of an attempt.
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
/// Parameters of a replacement; see [`Statements::replace_met`].
const REPLACE: [Type; 19] = [
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
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::BOOL,
    Type::BOOL,
    Type::INT8,
];

/// Parameters of a decision: key, new owner, state, attempts used, codec, result and its size, then the second to sixth
/// parameter of [`FORGET`], the operator and the reason, whether the body had begun, whether the journal changes, and
/// the length of the journal that was read.
const DECIDE: [Type; 17] = [
    Type::TEXT,
    Type::BYTEA,
    Type::TEXT,
    Type::INT8,
    Type::TEXT,
    Type::BYTEA,
    Type::INT8,
    Type::BYTEA,
    Type::INT8,
    Type::TEXT,
    Type::INT8,
    Type::BOOL,
    Type::TEXT,
    Type::TEXT,
    Type::BOOL,
    Type::BOOL,
    Type::INT8,
];
/// Parameters of a removal: key, then owner, attempt, state and attempts used of the record that was read, whether the
/// lease may be live, and whether the body had begun.
const FORGET: [Type; 7] = [Type::TEXT, Type::BYTEA, Type::INT8, Type::TEXT, Type::INT8, Type::BOOL, Type::BOOL];

/// Parameters of a list: the key before the range, the key after the range, the number of rows to read, and the states
/// (null: any state).
const LIST: [Type; 4] = [Type::TEXT, Type::TEXT, Type::INT8, Type::TEXT_ARRAY];
/// Largest number of rows that one page of a list reads.
const LOOKED_AT: usize = 2000;

impl Statements {
    /// Makes the statements for the table in `schema`.
    #[expect(clippy::too_many_lines, reason = "one list, to be read together")]
    pub(super) fn new(schema: &str) -> Self {
        let table = format!("{}.records", quoted(schema));
        let channel = channel(schema).replace('\'', "''");
        let ms = |ms: &str| format!("({ms}) * interval '1 millisecond'");
        let now = "statement_timestamp()";
        // An advisory lock shows whether a user's transaction holds the key: the row of an open transaction is
        // invisible to other sessions. The lock ends with the transaction. If another key has the same hash, the only
        // consequence is a wait.
        let lock_number = |key: &str| format!("hashtextextended({key} COLLATE \"C\", '{}'::bigint)", lock_seed(schema));
        // The statement first tests the lock, because an insert of a held key would wait for the transaction and delay
        // all other keys of the statement. The test releases the lock immediately: one lock for each key of a batch
        // could exhaust the server's memory for locks. If a transaction takes the key between this test and the insert,
        // the insert waits, up to the `lock_timeout`.
        let is_free = format!(
            "CASE WHEN pg_try_advisory_lock_shared({0}) THEN pg_advisory_unlock_shared({0}) ELSE false END",
            lock_number("u.key")
        );
        let asked = "(key, owner, fingerprint, on_crash_fail, lease_ms, ttl_ms, holder, traceparent)";
        let make = |from: &str, condition: &str| {
            format!(
                "INSERT INTO {table} AS r (key, owner, fingerprint, on_crash_fail, lease_ms, ttl_ms, holder, traceparent, \
                 format, state, attempt, attempts_used, first_seen_at, began_at, lapses_at, expires_at, listed_at) \
                 SELECT u.key, u.owner, u.fingerprint, u.on_crash_fail, u.lease_ms, u.ttl_ms, u.holder, u.traceparent, \
                 {VERSION}, 'pending', 1, 1, {now}, {now}, {now} + {}, {now} + {}, {now} + {} FROM {from} AS u {asked} \
                 WHERE {condition} ON CONFLICT (key) DO NOTHING RETURNING r.key",
                ms("u.lease_ms"),
                ms("u.lease_ms + u.ttl_ms"),
                ms("u.ttl_ms"),
            )
        };
        // Only a waiter sets `waited`. Without a waiter, the end of an attempt sends no notification, so its commit
        // does not take the lock that all commits with `NOTIFY` share.
        let wake = format!("CASE WHEN r.waited THEN pg_notify('{channel}', r.key) END");
        let there = format!("r.format = {VERSION} AND r.expires_at > {now}");
        // A row that another session has locked must not block the other rows of the statement. A row whose `xmax` is
        // zero was never locked since it was written. The statement first tries to lock every other row, and skips the
        // rows that another session holds. The rows are selected by key, because rows of two partitions may have the
        // same `ctid`.
        let free = |asked: &str| {
            format!(
                "(r.xmax = '0'::xid OR r.key = ANY (ARRAY(SELECT f.key FROM {asked} JOIN {table} AS f ON f.key = a.key \
                 WHERE f.xmax <> '0'::xid FOR NO KEY UPDATE OF f SKIP LOCKED)))"
            )
        };
        let (free_one, free_many) = (free("(VALUES ($1)) AS a (key)"), free("unnest($1) AS a (key)"));
        // The column `result` of a record in one of these states holds the journal.
        let unfinished = "('pending', 'released', 'interrupted')";
        // For a release, `u.attempt` is null: its caller may not know the attempt's number, so no number is compared.
        // A release keeps the journal for the next attempt. The result of a finished operation replaces the journal.
        let end = |from: &str, free: &str| {
            format!(
                "UPDATE {table} AS r SET state = u.state, attempts_used = greatest(r.attempts_used - u.refund, 0), \
                 on_crash_fail = (u.state = 'interrupted'), begun = false, lease_ms = NULL, ttl_ms = NULL, codec = u.codec, \
                 result = CASE WHEN u.state IN {unfinished} THEN r.result ELSE u.result END, \
                 result_bytes = u.result_bytes, lapses_at = {now}, expires_at = {now} + {ttl}, \
                 listed_at = least(r.listed_at, {now} + {ttl}) FROM {from} \
                 AS u (key, owner, state, refund, codec, result, result_bytes, ttl_ms, attempt) \
                 WHERE r.key = u.key AND r.owner = u.owner AND r.attempt = coalesce(u.attempt, r.attempt) \
                 AND r.state = 'pending' AND {there} AND {free} RETURNING r.key, {wake}",
                ttl = ms("u.ttl_ms"),
            )
        };
        let look = format!("SELECT {ANSWER}, {REST} FROM {table} AS r WHERE r.key = $1");
        let answer = format!("SELECT {ANSWER} FROM {table} AS r WHERE r.key = $1");
        let is_large = format!("octet_length(r.result) > {IN_A_BATCH}");
        let bounded = ANSWER.replace("r.result,", &format!("CASE WHEN {is_large} THEN NULL ELSE r.result END,"));
        // The statement uses a join, because `key = ANY($1)` would look for every key in every partition.
        let many =
            format!("{bounded}, r.key, {is_large} FROM unnest($1) AS a (key) JOIN {table} AS r ON r.key = a.key");
        let look_many = format!("SELECT {many}");
        let reserve = format!(
            "WITH made AS ({}) SELECT {ANSWER} FROM {table} AS r WHERE r.key = $1 \
             UNION ALL SELECT {MADE} FROM made",
            make("(VALUES ($1, $2, $3, $4, $5, $6, $7, $8))", &is_free),
        );
        let reserve_many = format!(
            "WITH made AS ({}) SELECT {many} UNION ALL SELECT {MADE}, made.key, false FROM made",
            make("unnest($1, $2, $3, $4, $5, $6, $7, $8)", &is_free),
        );
        let reserve_within = format!(
            "WITH held AS MATERIALIZED (SELECT pg_try_advisory_xact_lock({}) AS is_held), made AS ({}) \
             SELECT {ANSWER}, {REST}, made.key IS NOT NULL, held.is_held \
             FROM held LEFT JOIN made ON true LEFT JOIN {table} AS r ON r.key = $1",
            lock_number("$1"),
            make("(VALUES ($1, $2, $3, $4, $5, $6, $7, $8))", "(SELECT is_held FROM held)"),
        );
        // A new attempt replaces a record that is unchanged since it was read, in three cases: the record has expired,
        // its lease has lapsed, or its attempt has ended. The caller of the new attempt gets the journal that was read,
        // so the statement also compares the length of the journal: an append changes neither owner nor attempt. An
        // expired record may have a result in place of a journal, and the new attempt gets neither.
        let replace = format!(
            "UPDATE {table} AS r SET owner = $2, fingerprint = $3, on_crash_fail = $4, lease_ms = $5, ttl_ms = $6, \
             attempt = $7, attempts_used = $8, state = 'pending', begun = $18, codec = NULL, result_bytes = NULL, \
             result = CASE WHEN $12 THEN NULL ELSE r.result END, \
             holder = $13, traceparent = $14, decided_by = $15, decided_reason = $16, began_at = {now}, \
             first_seen_at = CASE WHEN $12 THEN {now} ELSE r.first_seen_at END, \
             lapses_at = {now} + {}, expires_at = {now} + {}, listed_at = least(r.listed_at, {now} + {}) \
             WHERE r.key = $1 AND r.format = {VERSION} AND r.owner = $9 AND r.attempt = $10 AND r.state = $11 AND r.begun = $17 AND \
             CASE WHEN $12 THEN r.expires_at <= {now} \
             ELSE r.expires_at > {now} AND (r.state <> 'pending' OR r.lapses_at <= {now}) \
             AND coalesce(octet_length(r.result), 0) = $19 END AND {free_one} RETURNING {wake}",
            ms("$5"),
            ms("$5 + $6"),
            ms("$6"),
        );
        let held = format!(
            "r.key = u.key AND r.owner = u.owner AND r.attempt = u.attempt AND r.state = 'pending' AND {there}"
        );
        let asked = "unnest($1, $2, $3) WITH ORDINALITY AS u (key, owner, attempt, place)";
        // `greatest`: a delayed renewal must not shorten a lease that a later renewal has extended.
        let renew = format!(
            "UPDATE {table} AS r SET lapses_at = greatest(r.lapses_at, {now} + {}), \
             expires_at = greatest(r.expires_at, {now} + {}) FROM {asked} WHERE {held} AND {free_many} RETURNING u.place",
            ms("r.lease_ms"),
            ms("r.lease_ms + r.ttl_ms"),
        );
        // The statement marks a record only while its lease is live, or again if the record is already marked: a late
        // request must not mark a record.
        let begin = format!(
            "UPDATE {table} AS r SET begun = true, lapses_at = greatest(r.lapses_at, {now} + {}), \
             expires_at = greatest(r.expires_at, {now} + {}) FROM {asked} \
             WHERE {held} AND (r.begun OR r.lapses_at > {now}) AND {free_many} RETURNING u.place",
            ms("r.lease_ms"),
            ms("r.lease_ms + r.ttl_ms"),
        );
        // A longer journal is a later one: a late copy of an earlier request must not replace it. The server knows the
        // length of a stored journal without reading its content.
        let append = |from: &str, free: &str| {
            format!(
                "UPDATE {table} AS r SET lapses_at = greatest(r.lapses_at, {now} + {}), \
                 expires_at = greatest(r.expires_at, {now} + {}), result = CASE \
                 WHEN coalesce(octet_length(r.result), 0) < octet_length(u.journal) THEN u.journal ELSE r.result END \
                 FROM {from} AS u (key, owner, attempt, journal, place) WHERE {held} AND {free} RETURNING u.place",
                ms("r.lease_ms"),
                ms("r.lease_ms + r.ttl_ms"),
            )
        };
        let append_many = append("unnest($1, $2, $3, $4) WITH ORDINALITY", &free_many);
        let append = append("(VALUES ($1, $2, $3, $4, 1::bigint))", &free_one);
        let held = format!("SELECT u.place FROM {asked} JOIN {table} AS r ON {held}");
        let pending = format!("r.key = $1 AND r.attempt = $2 AND r.state = 'pending' AND {there}");
        let mark = format!(
            "WITH marked AS \
             (UPDATE {table} AS r SET waited = true WHERE {pending} AND NOT r.waited AND {free_one} RETURNING 1) \
             SELECT EXISTS (SELECT FROM {table} AS r WHERE {pending}), EXISTS (SELECT FROM marked) \
             OR EXISTS (SELECT FROM {table} AS r WHERE {pending} AND r.waited)"
        );
        let is_pending = format!("SELECT EXISTS (SELECT FROM {table} AS r WHERE {pending})");
        // Parameter `first + 4` is true if the decision also applies while the lease is live.
        let met = |first: u32, begun: u32| {
            format!(
                "r.key = $1 AND r.owner = ${first} AND r.attempt = ${} AND r.state = ${} AND r.attempts_used = ${} \
                 AND r.begun = ${begun} AND {there} AND (${} OR r.state <> 'pending' OR r.lapses_at <= {now}) AND {free_one}",
                first + 1,
                first + 2,
                first + 3,
                first + 4,
            )
        };
        // A decision that does not finish the operation keeps the journal, to which the attempt may have appended since
        // the record was read. If the record has finished, its column holds a result, which must not become a journal.
        // A decision that changes the journal (`$16`) applies only to the journal that was read, of which `$17` is the
        // length. Messages that are marked as sent leave a finished record without another change, so a decision
        // about it applies only to the result that was read, whose length is `$17`, too.
        let decide = format!(
            "UPDATE {table} AS r SET owner = $2, state = $3, attempts_used = $4, codec = $5, \
             result = CASE WHEN NOT $16 AND $3 IN {unfinished} AND r.state IN {unfinished} THEN r.result ELSE $6 END, \
             result_bytes = $7, on_crash_fail = ($3 = 'interrupted'), begun = false, lease_ms = NULL, ttl_ms = NULL, decided_by = $13, \
             decided_reason = $14 WHERE {} \
             AND ((NOT $16 AND r.state IN {unfinished}) OR coalesce(octet_length(r.result), 0) = $17) RETURNING {wake}",
            met(8, 15),
        );
        let sent = sent(&table, &there, &free_many);
        let forget = format!("DELETE FROM {table} AS r WHERE {} RETURNING {wake}", met(2, 7));
        // The digest covers the binary form of the row: the text of a time or of bytes depends on settings of the
        // session.
        let digest = "sha256(record_send(r))";
        let examine = format!("SELECT {ANSWER}, {REST}, {digest} FROM {table} AS r WHERE r.key = $1");
        let forget_damaged =
            format!("DELETE FROM {table} AS r WHERE r.key = $1 AND {digest} = $2 AND {free_one} RETURNING {wake}");
        // `SKIP LOCKED` skips rows that another session is writing, so that a purge never waits. A later purge takes
        // these rows.
        let purge = format!(
            "WITH due AS MATERIALIZED (SELECT r.key, r.listed_at, r.expires_at <= {now} AS is_over FROM {table} AS r \
             WHERE r.listed_at >= $2 AND r.listed_at <= {now} AND r.format = {VERSION} ORDER BY r.listed_at LIMIT $1 FOR UPDATE SKIP LOCKED), \
             gone AS (DELETE FROM {table} AS r USING due WHERE r.key = due.key AND due.is_over RETURNING 1), \
             kept AS (UPDATE {table} AS r SET listed_at = r.expires_at FROM due \
             WHERE r.key = due.key AND NOT due.is_over RETURNING 1) \
             SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM kept), (SELECT max(listed_at) FROM due)"
        );
        // `LIMIT` is inside of `looked`: it bounds the rows that are read, before the filter on state and retention.
        // The last row of the answer contains the last key that was read.
        let unread = format!("{}, {REST}", ANSWER.replace("r.result,", "NULL::bytea,"));
        let none = "NULL::text, NULL::timestamptz";
        let list = format!(
            "WITH looked AS MATERIALIZED (SELECT r.format, r.state, r.owner, r.attempt, r.attempts_used, r.fingerprint, \
             r.on_crash_fail, r.begun, r.lease_ms, r.ttl_ms, r.codec, r.result_bytes, r.lapses_at, r.expires_at, r.holder, \
             r.traceparent, r.decided_by, r.decided_reason, r.first_seen_at, r.began_at, r.key, \
             octet_length(r.result)::bigint AS size FROM {table} AS r WHERE r.key > $1 AND r.key < $2 ORDER BY r.key \
             LIMIT $3) SELECT {unread}, r.key, r.size FROM looked AS r WHERE r.format <> {VERSION} \
             OR (r.expires_at > {now} AND ($4 IS NULL OR r.state = ANY($4))) UNION ALL SELECT {MADE}, {none}, max(key), count(*) FROM looked"
        );
        // The condition equals the condition of the index of undecided records, so that the statement reads this index.
        let list_undecided = list.replace("WHERE r.key > $1", "WHERE r.on_crash_fail AND r.key > $1");
        // The statement reads no row. If the table or a column is missing, or if the login may not read a column, the
        // server refuses this statement like the statements of calls. The statement returns the other rights that the
        // login lacks.
        let ping = format!(
            "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on', \
             ARRAY(SELECT p FROM unnest(ARRAY['INSERT', 'UPDATE', 'DELETE']) AS p \
             WHERE NOT has_table_privilege('{}'::regclass, p)), \
             EXISTS (SELECT {ANSWER}, {REST}, r.listed_at, r.waited FROM {table} AS r WHERE r.key = '')",
            table.replace('\'', "''"),
        );
        // Joins read the catalogs under one snapshot. `to_regclass` would also find a table that was committed after
        // the snapshot, and the snapshot lacks the comment on such a table.
        let check = "SELECT version(), current_setting('server_version_num')::bigint, current_setting('server_encoding'), \
                     pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', \
                     current_setting('fsync') = 'on' AND current_setting('synchronous_commit') <> 'off', \
                     c.oid IS NOT NULL, d.description, \
                     CASE WHEN NOT has_schema_privilege(n.oid, 'USAGE') THEN 'USAGE' END, \
                     ARRAY(SELECT p FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p \
                     WHERE NOT has_table_privilege(c.oid, p)) FROM (VALUES (1)) AS one \
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
            answer: statement(answer, &[Type::TEXT]),
            look_many: statement(look_many, &[Type::TEXT_ARRAY]),
            reserve: statement(reserve, &RESERVE),
            reserve_many: statement(reserve_many, &RESERVE_MANY),
            reserve_within: statement(reserve_within, &RESERVE),
            replace: statement(replace, &REPLACE),
            end: statement(end("(VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9))", &free_one), &END),
            end_many: statement(end("unnest($1, $2, $3, $4, $5, $6, $7, $8, $9)", &free_many), &END_MANY),
            renew: statement(renew, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY]),
            begin: statement(begin, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY]),
            append_many: statement(
                append_many,
                &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY, Type::BYTEA_ARRAY],
            ),
            append: statement(append, &[Type::TEXT, Type::BYTEA, Type::INT8, Type::BYTEA]),
            held: statement(held, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY]),
            mark: statement(mark, by_attempt),
            is_pending: statement(is_pending, by_attempt),
            decide: statement(decide, &DECIDE),
            sent: statement(sent, &[Type::TEXT_ARRAY, Type::BYTEA_ARRAY, Type::INT8_ARRAY, Type::TEXT_ARRAY]),
            forget: statement(forget, &FORGET),
            examine: statement(examine, &[Type::TEXT]),
            forget_damaged: statement(forget_damaged, &[Type::TEXT, Type::BYTEA]),
            purge: statement(purge, &[Type::INT8, Type::TIMESTAMPTZ]),
            list: statement(list, &LIST),
            list_undecided: statement(list_undecided, &LIST),
            ping: statement(ping, &[]),
            lock_timeout: statement("SELECT current_setting('lock_timeout')".to_owned(), &[]),
            hold: statement(format!("SELECT pg_advisory_xact_lock({})", lock_number("$1")), &[Type::TEXT]),
            check: statement(check.to_owned(), &[Type::TEXT]),
        }
    }
}

const VERSION: i64 = Parts::VERSION;

/// Executes statements: in the pool, where each statement is a transaction, or in the user's transaction.
pub(super) trait Executor {
    type Row: Cells;
    type Error;

    /// Returns the rows of `statement`.
    fn rows(
        &self,
        statement: &Statement,
        params: &[&(dyn ToSql + Sync)],
        effect: Effect,
    ) -> impl Future<Output = Result<Vec<Self::Row>, Self::Error>>;
}

impl Statements {
    /// Returns the record of `key`, expired or not.
    pub(super) async fn look_at<A: Executor>(&self, at: &A, key: &str) -> Result<Option<FoundRow>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        match at.rows(&self.look, &[&key], Effect::Reads).await?.first().map(|row| met(row, Columns::All)) {
            Some(LookupResult::Found(found)) => Ok(Some(*found.map_err(corrupt)?)),
            Some(LookupResult::Made | LookupResult::Unseen | LookupResult::LeftOut) => {
                Err(corrupt(FormatError::Damaged))
            }
            None => Ok(None),
        }
    }

    /// Returns the record of `key` as an operator sees it, unless it has expired.
    pub(super) async fn inspect_at<A: Executor>(&self, at: &A, key: &str) -> Result<Option<Inspection>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        match self.look_at(at, key).await {
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                Ok(self.examine_at(at, key).await?.map(|(inspection, _)| inspection))
            }
            found => Ok(found?.filter(|found| !found.is_expired()).map(FoundRow::inspection)),
        }
    }

    /// Returns an unreadable row as an operator sees it, and the digest of all its columns.
    async fn examine_at<A: Executor>(&self, at: &A, key: &str) -> Result<Option<(Inspection, Vec<u8>)>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        let rows = at.rows(&self.examine, &[&key], Effect::Reads).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let digest: Vec<u8> = row.cell(DIGEST_AT).map_err(corrupt)?;
        let inspection = match met(row, Columns::All) {
            LookupResult::Found(Ok(found)) if found.is_expired() => return Ok(None),
            LookupResult::Found(Ok(found)) => found.inspection(),
            LookupResult::Found(Err(why)) => Inspection::damaged(why.to_string(), [&digest]),
            LookupResult::Made | LookupResult::Unseen | LookupResult::LeftOut => {
                Inspection::damaged(FormatError::Damaged.to_string(), [&digest])
            }
        };
        Ok(Some((inspection, digest)))
    }

    /// Applies an operator's decision to an unreadable row. Returns `None` if the row has changed meanwhile, or is
    /// locked.
    async fn decide_damaged<A: Executor>(
        &self,
        at: &A,
        decision: &Decision,
    ) -> Result<Option<DecisionAnswer>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        let key = decision.key.as_str();
        let Some((found, digest)) = self.examine_at(at, key).await? else { return Ok(Some(DecisionAnswer::NoRecord)) };
        if found.damage.is_none() {
            return Ok(None);
        }
        if let Ruling::Answer(refused) = found.decide(decision) {
            return Ok(Some(refused));
        }
        let rows = at.rows(&self.forget_damaged, &[&key, &HiddenParam(digest.as_slice())], Effect::Writes).await?;
        Ok((!rows.is_empty()).then_some(DecisionAnswer::Applied))
    }

    /// Replaces the record `met` if the record is still unchanged. Returns whether the record was replaced.
    pub(super) async fn replace_met<A: Executor>(
        &self,
        at: &A,
        request: &ReserveRequest,
        met: &FoundRow,
        with: &Record,
    ) -> Result<bool, A::Error> {
        let (parts, seen) = (Parts::of(with), Parts::of(&met.record));
        let params: [&(dyn ToSql + Sync); 19] = [
            &request.key.as_str(),
            &HiddenParam(parts.owner),
            &HiddenParam(parts.fingerprint),
            &parts.on_crash_fail,
            &millis(request.lease),
            &millis(request.ttl),
            &parts.attempt,
            &parts.attempts_used,
            &HiddenParam(seen.owner),
            &seen.attempt,
            &seen.state,
            &met.is_expired(),
            &parts.holder,
            &parts.traceparent,
            &parts.decided_by,
            &parts.decided_reason,
            &seen.begun,
            &parts.begun,
            &stored_length(&met.record),
        ];
        Ok(!at.rows(&self.replace, &params, Effect::Writes).await?.is_empty())
    }

    /// Applies an operator's decision to the record of its key. Returns `None` if the record has changed meanwhile, or
    /// is locked.
    pub(super) async fn try_decide<A: Executor>(
        &self,
        at: &A,
        decision: &Decision,
    ) -> Result<Option<DecisionAnswer>, StoreError>
    where
        StoreError: From<A::Error>,
    {
        let key = decision.key.as_str();
        // An unreadable row can only be forgotten. An expired record is treated as absent.
        let found = match self.look_at(at, key).await {
            Err(error) if error.kind() == StoreErrorKind::Corrupt => return self.decide_damaged(at, decision).await,
            found => found?.filter(|found| !found.is_expired()),
        };
        let Some(found) = found else { return Ok(Some(DecisionAnswer::NoRecord)) };
        let with = match found.record.decide(decision, found.lapses_in()) {
            Ruling::Answer(refused) => return Ok(Some(refused)),
            Ruling::Replace(with) => Some(with),
            Ruling::Remove => None,
        };
        // Writes only if the record is unchanged since it was read: the parameters contain its owner, attempt, state
        // and number of attempts used.
        let seen = Parts::of(&found.record);
        let may_live = decision.ends_live_lease();
        let rows = match &with {
            Some(with) => {
                let parts = Parts::of(with);
                // The statement itself keeps the journal of an unfinished record, so only a changed journal is sent.
                let changes_journal = matches!(decision.action, Action::ReopenWith(_));
                let result = parts.result.as_deref().filter(|_| with.is_finished() || changes_journal);
                let params: [&(dyn ToSql + Sync); 17] = [
                    &key,
                    &HiddenParam(parts.owner),
                    &parts.state,
                    &parts.attempts_used,
                    &parts.codec,
                    &HiddenParam(result),
                    &parts.result_bytes,
                    &HiddenParam(seen.owner),
                    &seen.attempt,
                    &seen.state,
                    &seen.attempts_used,
                    &may_live,
                    &parts.decided_by,
                    &parts.decided_reason,
                    &seen.begun,
                    &changes_journal,
                    &stored_length(&found.record),
                ];
                at.rows(&self.decide, &params, Effect::Records(result.map_or(0, <[u8]>::len))).await?
            }
            None => {
                let params: [&(dyn ToSql + Sync); 7] = [
                    &key,
                    &HiddenParam(seen.owner),
                    &seen.attempt,
                    &seen.state,
                    &seen.attempts_used,
                    &may_live,
                    &seen.begun,
                ];
                at.rows(&self.forget, &params, Effect::Writes).await?
            }
        };
        Ok((!rows.is_empty()).then_some(DecisionAnswer::Applied))
    }

    /// Ends the attempt that `record` names, if the attempt is pending. Returns whether the attempt was ended.
    pub(super) async fn end_pending<A: Executor>(
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
            &HiddenParam(parts.owner),
            &parts.state,
            &refund,
            &parts.codec,
            &HiddenParam(parts.result.as_deref()),
            &parts.result_bytes,
            &millis(ttl),
            &number_of(record),
        ];
        let effect = Effect::Records(record.state.result().map_or(0, StoredResult::stored_bytes));
        Ok(!at.rows(&self.end, &params, effect).await?.is_empty())
    }
}

/// Makes the statement that removes the messages from finished records. It takes the stored result out of the
/// [envelope](crate::record::envelope), whose form it checks first, so that a damaged record fails no other record.
/// The statement leaves out codec names that `encode` would change. Its text has no backslash, which servers of two
/// settings read in two ways.
fn sent(table: &str, there: &str, free: &str) -> String {
    let most = CodecName::MAX_BYTES;
    let name = "CASE WHEN octet_length(r.result) > 12 THEN get_byte(r.result, 2) ELSE 0 END";
    let codec = format!("encode(substring(r.result FROM 4 FOR {name}), 'escape')");
    let size = format!("('x' || encode(substring(r.result FROM {name} + 4 FOR 8), 'hex'))::bit(64)::bigint");
    format!(
        "UPDATE {table} AS r SET codec = {codec}, \
         result = substring(r.result FROM {name} + 13 FOR ({size})::int) \
         FROM unnest($1, $2, $3, $4) WITH ORDINALITY AS u (key, owner, attempt, state, place) \
         WHERE r.key = u.key AND substring(r.owner FROM 1 FOR 8) = u.owner AND r.attempt = u.attempt AND r.state = u.state \
         AND r.codec = '{MESSAGES_CODEC}' AND substring(r.result FROM 1 FOR 2) = decode('{MESSAGES_START}', 'hex') \
         AND substring(r.result FROM {name} + 12 FOR 1) = decode('00', 'hex') \
         AND {name} BETWEEN 1 AND {most} AND strpos({codec}, chr(92)) = 0 \
         AND {size} BETWEEN 0 AND octet_length(r.result) - 12 - {name} AND {there} AND {free} RETURNING u.place"
    )
}

impl<'a> FromSql<'a> for Micros {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        Ok(Self(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }
}

impl ToSql for Micros {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.extend_from_slice(&self.0.to_be_bytes());
        Ok(IsNull::No)
    }

    fn accepts(ty: &Type) -> bool {
        *ty == Type::TIMESTAMPTZ
    }

    to_sql_checked!();
}

/// Answer for one key of a statement that reserves or reads records.
#[derive(Clone, Debug)]
pub(super) enum LookupResult {
    /// This statement made the record.
    Made,
    /// The key has a row: a record, or a row that can't be read.
    Found(Result<Box<FoundRow>, FormatError>),
    /// The statement did not see the record of the key: another session has not committed the record, or committed it
    /// too late for the statement.
    Unseen,
    /// The key has a record, whose result or journal the statement left out.
    LeftOut,
}

/// Returns the key in a row of a statement that reads many records.
pub(super) fn key(row: &Row) -> Option<&str> {
    row.try_get(KEY_OF_MANY_AT).ok()
}

/// Returns for each of `count` leases whether an answer contains its index. The server counts from 1.
pub(super) fn answered(rows: &[Row], count: usize) -> Vec<bool> {
    let mut answered = vec![false; count];
    for row in rows {
        let place = row.try_get::<_, i64>(0).ok().and_then(|place| usize::try_from(place.checked_sub(1)?).ok());
        if let Some(it) = place.and_then(|place| answered.get_mut(place)) {
            *it = true;
        }
    }
    answered
}

/// Reads a row of a statement that reads many records.
pub(super) fn met_in_a_batch(row: &Row) -> LookupResult {
    match row.try_get::<_, Option<bool>>(LEFT_OUT_AT) {
        Ok(Some(true)) => LookupResult::LeftOut,
        _ => met(row, Columns::Answer),
    }
}

fn is_null<'a, T: FromSql<'a>>(row: &'a impl Cells, at: usize) -> bool {
    matches!(row.cell::<Option<T>>(at), Ok(None))
}

/// Reads a row with these columns.
pub(super) fn met(row: &impl Cells, columns: Columns) -> LookupResult {
    match row.cell::<Option<i16>>(0) {
        // A row of nulls means that the statement made the record. If the format is null but other columns are not, the
        // row is damaged.
        Ok(None) if is_null::<&str>(row, 1) && is_null::<&[u8]>(row, 2) => LookupResult::Made,
        Ok(Some(format)) => LookupResult::Found(found(row, format, ReadExtent::Whole, columns).map(Box::new)),
        _ => LookupResult::Found(Err(FormatError::Damaged)),
    }
}

/// The values in a row, of any driver.
pub trait Cells {
    /// Returns the value in the column `at`.
    ///
    /// # Errors
    /// If there is no value, or the value has another type.
    #[doc(hidden)]
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError>;
}

impl Cells for Row {
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError> {
        self.try_get(at).map_err(|_| FormatError::Damaged)
    }
}

/// Answer of [`Statements::reserve_within`].
pub(super) struct WithinAnswer {
    /// True if the user's transaction holds the key.
    pub(super) is_held: bool,
    pub(super) met: LookupResult,
}

/// Reads a row of [`Statements::reserve_within`].
pub(super) fn within(row: &impl Cells) -> Result<WithinAnswer, FormatError> {
    let (is_made, is_held): (bool, bool) = (row.cell(KEY_AT)?, row.cell(KEY_AT + 1)?);
    let met = match met(row, Columns::All) {
        LookupResult::Made if !is_made => LookupResult::Unseen,
        met => met,
    };
    Ok(WithinAnswer { is_held, met })
}

fn found(row: &impl Cells, format: i16, reading: ReadExtent, columns: Columns) -> Result<FoundRow, FormatError> {
    let (holder, first_seen_at) = match columns {
        Columns::Answer => (None, None),
        Columns::All => (row.cell(REST_AT)?, Some(row.cell(REST_AT + 1)?)),
    };
    let record = Parts { reading, holder, ..parts(row, format)? }.record()?;
    let time = |at: usize| row.cell::<Micros>(at);
    let (lapses_at, expires_at, now, began_at) = (time(12)?, time(13)?, time(14)?, time(15)?);
    Ok(FoundRow { record, lapses_at, expires_at, now, first_seen_at, began_at })
}

/// Reads the rows of [`Statements::list`].
pub(super) fn page(rows: &[Row], filter: &Filter, looked_at: i64) -> Result<Page, FormatError> {
    let mut page = Page::default();
    let mut entries = Vec::with_capacity(rows.len());
    let mut last = None;
    for row in rows {
        let key: Option<&str> = row.cell(KEY_AT)?;
        match (key, row.cell::<Option<i16>>(0)?) {
            (Some(key), Some(format)) => entries.push((key, row, format)),
            (key, None) => last = key.filter(|_| row.cell::<i64>(SIZE_AT) == Ok(looked_at)),
            (None, Some(_)) => return Err(FormatError::Damaged),
        }
    }
    entries.sort_by_key(|(key, ..)| *key);
    for (key, row, format) in entries {
        if page.records.len() == filter.most() {
            page.next = page.records.last().map(|(key, _)| Cursor::new(key.as_str()));
            return Ok(page);
        }
        let size = row.cell::<Option<i64>>(SIZE_AT)?.and_then(|size| u64::try_from(size).ok());
        let found = found(row, format, ReadExtent::WithoutResult(size), Columns::All);
        let found = found.map_or_else(|why| Inspection::unexamined(&why), FoundRow::inspection);
        page.add::<FormatError>(filter, key, Ok(Some(found)));
    }
    page.next = last.map(Cursor::new);
    Ok(page)
}

/// Returns the parameters of [`Statements::list`] for `filter`: the key before the range, the key after the range, the
/// number of rows, and the states. A filter for damaged records passes no states, because a damaged row may have any
/// state.
pub(super) fn list(filter: &Filter) -> (String, String, i64, Option<Vec<&'static str>>) {
    let prefix = filter.prefix();
    // First string that sorts after every key with this prefix: the prefix ends with `/`, and `0` follows `/`.
    let end = format!("{}0", &prefix[..prefix.len() - 1]);
    let after = filter.after.as_ref().map_or("", Cursor::as_str).max(&prefix).to_owned();
    let looked_at = if filter.is_selective() { LOOKED_AT } else { filter.most() };
    let mut states: Vec<_> = Standing::ALL.into_iter().filter(|it| filter.takes(*it)).map(Standing::state).collect();
    states.dedup();
    let states = (!filter.takes(Standing::Damaged)).then_some(states);
    (after, end, i64::try_from(looked_at).unwrap_or(i64::MAX), states)
}

fn parts(row: &impl Cells, format: i16) -> Result<Parts<'_>, FormatError> {
    Ok(Parts {
        reading: ReadExtent::Whole,
        holder: None,
        traceparent: row.cell(16)?,
        decided_by: row.cell(17)?,
        decided_reason: row.cell(18)?,
        begun: row.cell(19)?,
        format: format.into(),
        state: row.cell(1)?,
        owner: row.cell(2)?,
        attempt: row.cell(3)?,
        attempts_used: row.cell(4)?,
        fingerprint: row.cell(5)?,
        on_crash_fail: row.cell(6)?,
        lease_ms: row.cell(7)?,
        ttl_ms: row.cell(8)?,
        codec: row.cell(9)?,
        result: row.cell::<Option<&[u8]>>(10)?.map(Bytes::copy_from_slice),
        result_bytes: row.cell(11)?,
    })
}
