//! The table of records: its columns, and the statements of each operation.
//!
//! The caller of every function here has opened a transaction on the connection. A reservation, a renewal and the end
//! of an attempt start with a write. So even a transaction that was not begun as `IMMEDIATE` holds the write lock
//! before it reads. `now` is [`wall_millis`](crate::clock::wall_millis), read inside of the transaction.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use bytes::Bytes;
use rusqlite::types::{FromSqlError, Value, ValueRef};
use rusqlite::{CachedStatement, Connection, Row, Statement, ToSql, params};

use crate::key::Key;
use crate::record::format::FormatError;
use crate::record::{
    Admission, Decision, DecisionAnswer, Finish, Inspection, Journal, Lease, Parts, ReadExtent, Record, Release,
    Reservation, ReserveRequest, Ruling, State, Verdict, signed_millis,
};
use crate::store::{Cursor, Filter, Page};

/// Default name of the table.
pub(super) const NAME: &str = "idem_records";
/// Largest result in bytes: SQLite's limit for a row (`SQLITE_MAX_LENGTH`), less the largest size of the other columns.
const MAX_RESULT_BYTES: usize = 1_000_000_000 - 16 * 1024;
/// Time after which clean-up visits a row of another version again, in milliseconds.
const NOT_OURS: i64 = 24 * 3600 * 1000;

/// The columns of version 1, in their order. Every later version adds at least one column, so that this release
/// recognises and refuses the table.
const COLUMNS: [&str; 23] = [
    "key",
    "format",
    "state",
    "owner",
    "attempt",
    "attempts_used",
    "fingerprint",
    "on_crash_fail",
    "begun",
    "lease_ms",
    "ttl_ms",
    "lapses_at",
    "expires_at",
    "listed_at",
    "first_seen_at",
    "began_at",
    "holder",
    "traceparent",
    "decided_by",
    "decided_reason",
    "codec",
    "result_bytes",
    "result",
];

/// Columns that a replay reads before the result, in this order.
const ANSWER: &str = "format, expires_at, state, owner, attempt, attempts_used, fingerprint, on_crash_fail, lease_ms, ttl_ms, \
                      lapses_at, traceparent, began_at, begun, codec, result_bytes";
/// Columns that every other look-up reads after the result, in this order.
const REST: &str = "holder, decided_by, decided_reason, first_seen_at";
/// Index of the result. The next three constants are the indexes of the first column in [`REST`], of the size of a
/// result that a list leaves out, and of the key in a list.
const RESULT_AT: usize = 16;
const REST_AT: usize = 17;
const SIZE_AT: usize = 21;
const KEY_AT: usize = 22;
/// Largest result that a lone caller reads on its own thread, in bytes: a few pages.
pub(super) const SMALL_RESULT: usize = 16 * 1024;
/// Largest number of rows that one page of a list reads.
const LOOKED_AT: usize = 2_000;

/// Reason why an operation has no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// SQLite refused or failed.
    Sqlite(rusqlite::Error),
    /// The row is not a record.
    Format(FormatError),
    /// The result, of this many bytes, does not fit into a row.
    TooLarge(usize),
}

impl From<rusqlite::Error> for Trouble {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

impl From<FormatError> for Trouble {
    fn from(error: FormatError) -> Self {
        Self::Format(error)
    }
}

impl From<FromSqlError> for Trouble {
    fn from(_: FromSqlError) -> Self {
        Self::Format(FormatError::Damaged)
    }
}

/// State of the table with the configured name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum TableForm {
    Absent,
    Ours,
    /// The table has all columns of this version, and these further columns.
    Later(Vec<String>),
    Foreign,
}

impl TableForm {
    /// Returns the reason why this table can't be used; `None` if the table can be used.
    pub(super) fn problem(&self) -> Option<String> {
        match self {
            Self::Ours => None,
            Self::Absent => Some("is gone".to_owned()),
            Self::Foreign => Some("is not of this library; it is left alone: choose another name".to_owned()),
            Self::Later(columns) => {
                Some(format!("has columns of a later release ({}); upgrade this process", columns.join(", ")))
            }
        }
    }
}

/// Refuses an invalid name of a table.
pub(super) fn check_name(table: &str) -> Result<(), String> {
    let is_name = table.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !table.is_empty();
    if !is_name || table.to_ascii_lowercase().starts_with("sqlite_") {
        return Err(format!("`{table}` can't be the name of a table: write letters, digits and `_`"));
    }
    Ok(())
}

/// Returns whether the table `name` is absent, has this version's columns, has further columns of a later version,
/// or is foreign.
pub(crate) fn form(connection: &Connection, name: &str) -> rusqlite::Result<TableForm> {
    let mut columns = connection.prepare("SELECT name FROM pragma_table_info(?1)")?;
    let columns = columns.query_map([name], |row| row.get::<_, String>(0))?;
    let columns = columns.collect::<rusqlite::Result<Vec<_>>>()?;
    Ok(match COLUMNS.iter().all(|ours| columns.iter().any(|column| column == ours)) {
        _ if columns.is_empty() => TableForm::Absent,
        true if columns.len() == COLUMNS.len() => TableForm::Ours,
        true => TableForm::Later(columns.into_iter().filter(|column| !COLUMNS.contains(&&**column)).collect()),
        false => TableForm::Foreign,
    })
}

/// Creates the table `name` and its index, unless they exist.
pub(crate) fn create(connection: &Connection, name: &str) -> rusqlite::Result<()> {
    connection.execute_batch(&ddl(name))
}

/// Returns the statements that create the table `name` and its index.
pub(super) fn ddl(name: &str) -> String {
    let name = name.replace('"', "\"\"");
    // Times are milliseconds since 1970. The result may be long, so it comes after the columns that waiting duplicates
    // and clean-up read. `listed_at` is the time at which clean-up visits the row next; a completion does not change
    // `listed_at`, and changes no index except under `on_crash = fail`. `on_crash_fail` is also set in an interrupted
    // record: the index of undecided records holds such records, too. No decision depends on the columns from
    // `first_seen_at` to `decided_reason`.
    format!(
        r#"CREATE TABLE IF NOT EXISTS "{name}" (
    key           TEXT    NOT NULL PRIMARY KEY,
    format        INTEGER NOT NULL,
    state         TEXT    NOT NULL,
    owner         BLOB    NOT NULL,
    attempt       INTEGER NOT NULL,
    attempts_used INTEGER NOT NULL,
    fingerprint   BLOB,
    on_crash_fail INTEGER NOT NULL,
    begun         INTEGER NOT NULL DEFAULT 0,
    lease_ms      INTEGER,
    ttl_ms        INTEGER,
    lapses_at     INTEGER,
    expires_at    INTEGER NOT NULL,
    listed_at     INTEGER NOT NULL,
    first_seen_at INTEGER NOT NULL,
    began_at      INTEGER NOT NULL,
    holder        TEXT,
    traceparent   TEXT,
    decided_by    TEXT,
    decided_reason TEXT,
    codec         TEXT,
    result_bytes  INTEGER,
    result        BLOB
);
CREATE INDEX IF NOT EXISTS "{name}_listed" ON "{name}" (listed_at);
CREATE INDEX IF NOT EXISTS "{name}_undecided" ON "{name}" (key) WHERE on_crash_fail;"#
    )
}

#[derive(Clone, Copy, Debug)]
enum Sql {
    Insert,
    Replace,
    Select,
    Stored,
    Answer,
    AnswerSmall,
    Finish,
    Release,
    Begin,
    Renew,
    Append,
    Decide,
    Forget,
    Due,
    Delete,
    Relist,
    List,
    ListUndecided,
    Ping,
}

impl Sql {
    const ALL: [Self; 19] = [
        Self::Insert,
        Self::Replace,
        Self::Select,
        Self::Stored,
        Self::Answer,
        Self::AnswerSmall,
        Self::Finish,
        Self::Release,
        Self::Begin,
        Self::Renew,
        Self::Append,
        Self::Decide,
        Self::Forget,
        Self::Due,
        Self::Delete,
        Self::Relist,
        Self::List,
        Self::ListUndecided,
        Self::Ping,
    ];
    const COUNT: usize = Self::ALL.len();

    fn text(self, table: &str) -> String {
        // `owned` is the condition for writes by an owner; `held` also compares the number of the attempt.
        let owned = "key = ?1 AND owner = ?2 AND state = 'pending' AND format = 1 AND expires_at > ?3";
        let held = format!("{owned} AND attempt = ?4");
        match self {
            Self::Insert => format!(
                r#"INSERT INTO "{table}" (key, owner, format, state, attempt, attempts_used, fingerprint, on_crash_fail, lease_ms,
                ttl_ms, lapses_at, expires_at, holder, traceparent, decided_by, decided_reason, began_at, first_seen_at, begun, listed_at)
                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20)
                ON CONFLICT (key) DO NOTHING"#
            ),
            Self::Replace => format!(
                r#"UPDATE "{table}" SET owner = ?2, format = ?3, state = ?4, attempt = ?5, attempts_used = ?6, fingerprint = ?7,
                on_crash_fail = ?8, begun = ?19, lease_ms = ?9, ttl_ms = ?10, lapses_at = ?11, expires_at = ?12, holder = ?13,
                traceparent = ?14, decided_by = ?15, decided_reason = ?16, began_at = ?17,
                first_seen_at = coalesce(?18, first_seen_at), codec = NULL, result_bytes = NULL, result = ?20 WHERE key = ?1"#
            ),
            Self::Select => format!(r#"SELECT {ANSWER}, result, {REST} FROM "{table}" WHERE key = ?1"#),
            Self::Stored => format!(r#"SELECT {} FROM "{table}" WHERE key = ?1"#, COLUMNS.join(", ")),
            Self::Answer => format!(r#"SELECT {ANSWER}, result FROM "{table}" WHERE key = ?1"#),
            // SQLite returns the size of a result without reading it.
            Self::AnswerSmall => format!(
                r#"SELECT {ANSWER}, result FROM "{table}" WHERE key = ?1 AND ifnull(length(result), 0) <= {SMALL_RESULT}"#
            ),
            // No `LIMIT` is used: SQLite would prepare the statement anew for each value of the limit.
            Self::List => format!(
                r#"SELECT {ANSWER}, NULL, {REST}, length(result), key FROM "{table}" WHERE key > ?1 AND key < ?2 ORDER BY key"#
            ),
            // The condition equals the condition of the index of undecided records, so that the statement reads this
            // index.
            Self::ListUndecided => Self::List.text(table).replace("WHERE", "WHERE on_crash_fail AND"),
            Self::Ping => format!(r#"SELECT {ANSWER}, {REST}, listed_at FROM "{table}" LIMIT 1"#),
            Self::Finish => format!(
                r#"UPDATE "{table}" SET state = ?5, on_crash_fail = 0, begun = 0, lease_ms = NULL, ttl_ms = NULL, lapses_at = NULL,
                expires_at = ?6, codec = ?7, result_bytes = ?8, result = ?9 WHERE {held}"#
            ),
            Self::Release => format!(
                r#"UPDATE "{table}" SET state = ?4, attempts_used = max(attempts_used - ?6, 0),
                on_crash_fail = (?4 = 'interrupted'), begun = 0,
                lease_ms = NULL, ttl_ms = NULL, lapses_at = NULL, expires_at = ?5 WHERE {owned}"#
            ),
            // The statement marks a record only while its lease is live, or again if the record is already marked: a
            // late request must not mark a record.
            Self::Begin => format!(
                r#"UPDATE "{table}" SET begun = 1, lapses_at = max(lapses_at, ?5), expires_at = max(expires_at, ?6)
                WHERE {held} AND (begun OR lapses_at > ?3)"#
            ),
            // `max`: a renewal never shortens a confirmed lease, even if the clock steps back.
            Self::Renew => format!(
                r#"UPDATE "{table}" SET lapses_at = max(lapses_at, ?5), expires_at = max(expires_at, ?6) WHERE {held}"#
            ),
            // A longer journal is a later one: a late copy of an earlier request must not replace it.
            Self::Append => format!(
                r#"UPDATE "{table}" SET lapses_at = max(lapses_at, ?5), expires_at = max(expires_at, ?6),
                result = iif(ifnull(length(result), 0) < length(?7), ?7, result) WHERE {held}"#
            ),
            Self::Decide => format!(
                r#"UPDATE "{table}" SET owner = ?2, state = ?3, attempts_used = ?4,
                on_crash_fail = (?3 = 'interrupted'), begun = 0,
                lease_ms = NULL, ttl_ms = NULL, lapses_at = NULL, codec = ?5, result_bytes = ?6, result = ?7, decided_by = ?8,
                decided_reason = ?9 WHERE key = ?1"#
            ),
            Self::Forget => format!(r#"DELETE FROM "{table}" WHERE key = ?1"#),
            Self::Due => {
                // No `LIMIT` is used: SQLite would prepare the statement anew for each value of the limit.
                format!(r#"SELECT key FROM "{table}" WHERE listed_at <= ?1 ORDER BY listed_at"#)
            }
            Self::Delete => format!(r#"DELETE FROM "{table}" WHERE key = ?1 AND format = 1 AND expires_at <= ?2"#),
            Self::Relist => {
                format!(r#"UPDATE "{table}" SET listed_at = iif(expires_at > ?2, expires_at, ?3) WHERE key = ?1"#)
            }
        }
    }
}

/// A record and its times.
struct FoundRow {
    record: Record,
    lapses_at: Option<i64>,
    expires_at: i64,
    /// `None` if the statement did not read this column.
    first_seen_at: Option<i64>,
    began_at: i64,
}

impl FoundRow {
    fn meet(self, request: &ReserveRequest, now: i64) -> Admission {
        let (lapses_in, age) = (self.lapses_in(now).unwrap_or_default(), until(now, self.began_at));
        match self.record.admit_owned(request, lapses_in) {
            Admission::Answer(answer) => Admission::Answer(answer.aged(age)),
            replace @ Admission::Replace { .. } => replace,
        }
    }

    fn inspection(self, now: i64) -> Inspection {
        let lapses_in = self.lapses_in(now);
        let (first_seen, began) = (self.first_seen_at.map(|at| until(now, at)), until(now, self.began_at));
        Inspection::new(self.record, until(self.expires_at, now), lapses_in).since(first_seen, Some(began))
    }

    /// Returns the remaining time of the lease; `None` unless the record is pending. The result never exceeds the whole
    /// lease, although a look-up may have read the clock just before the row was written.
    fn lapses_in(&self, now: i64) -> Option<Duration> {
        match self.record.state {
            State::Pending { lease, .. } => Some(until(self.lapses_at?, now).min(lease)),
            _ => None,
        }
    }
}

fn until(at: i64, now: i64) -> Duration {
    Duration::from_millis(u64::try_from(at.saturating_sub(now)).unwrap_or_default())
}

fn after(now: i64, duration: Duration) -> i64 {
    now.saturating_add(signed_millis(duration))
}

/// The texts of all statements on one table.
#[derive(Debug)]
pub(super) struct Texts([String; Sql::COUNT]);

impl Texts {
    pub(super) fn of(table: &str) -> Self {
        Self(Sql::ALL.map(|sql| sql.text(table)))
    }
}

/// Source of the statements: prepared for one use of the table (from its name), or kept by the connection.
enum StatementSource<'c> {
    Name(&'c str),
    Kept(&'c Texts),
}

enum ReadyStatement<'c> {
    Once(Statement<'c>),
    Kept(CachedStatement<'c>),
}

impl<'c> Deref for ReadyStatement<'c> {
    type Target = Statement<'c>;

    fn deref(&self) -> &Statement<'c> {
        match self {
            Self::Once(statement) => statement,
            Self::Kept(statement) => statement,
        }
    }
}

impl<'c> DerefMut for ReadyStatement<'c> {
    fn deref_mut(&mut self) -> &mut Statement<'c> {
        match self {
            Self::Once(statement) => statement,
            Self::Kept(statement) => statement,
        }
    }
}

/// The table of records on one connection. A statement is prepared at its first use.
pub(crate) struct Table<'c> {
    connection: &'c Connection,
    source: StatementSource<'c>,
    statements: [Option<ReadyStatement<'c>>; Sql::COUNT],
}

impl<'c> Table<'c> {
    /// Makes a [`Table`] whose prepared statements live as long as this value.
    pub(crate) fn new(connection: &'c Connection, name: &'c str) -> Self {
        Self { connection, source: StatementSource::Name(name), statements: [const { None }; Sql::COUNT] }
    }

    /// Makes a [`Table`] whose prepared statements the connection keeps for later uses.
    pub(super) fn kept(connection: &'c Connection, texts: &'c Texts) -> Self {
        Self { connection, source: StatementSource::Kept(texts), statements: [const { None }; Sql::COUNT] }
    }

    fn sql(&mut self, sql: Sql) -> rusqlite::Result<&mut Statement<'c>> {
        let slot = &mut self.statements[sql as usize];
        if slot.is_none() {
            *slot = Some(match self.source {
                StatementSource::Name(table) => ReadyStatement::Once(self.connection.prepare(&sql.text(table))?),
                StatementSource::Kept(texts) => {
                    ReadyStatement::Kept(self.connection.prepare_cached(&texts.0[sql as usize])?)
                }
            });
        }
        Ok(slot.as_mut().expect("was just filled"))
    }

    /// Returns whether another owner's lease on the key has lapsed by `now`, but was still live at `since`.
    pub(super) fn is_spared(&mut self, request: &ReserveRequest, since: i64, now: i64) -> Result<bool, Trouble> {
        let found = self.find(&request.key, now)?.filter(|found| found.record.owner != request.owner);
        Ok(found.is_some_and(|found| {
            let held = |at| found.lapses_in(at).is_some_and(|left| !left.is_zero());
            held(since) && !held(now)
        }))
    }

    /// Reserves the key, or answers from the existing record.
    pub(crate) fn reserve(&mut self, request: &ReserveRequest, now: i64) -> Result<Reservation, Trouble> {
        let first = Record::first(request);
        if self.put(Sql::Insert, &request.key, &first, true, Some(request.ttl), now)? {
            return Ok(first.grant(request, false));
        }
        let found = self.find(&request.key, now)?;
        let is_first = found.is_none();
        let meeting = found.map(|found| found.meet(request, now));
        let (record, takeover) = match meeting {
            Some(Admission::Answer(answer)) => return Ok(answer),
            Some(Admission::Replace { with, takeover }) => (with, takeover),
            None => (first, false),
        };
        self.put(Sql::Replace, &request.key, &record, is_first, None, now)?;
        Ok(record.grant(request, takeover))
    }

    /// Returns the answer to `request` if the reservation changes nothing; `None` if the reservation has to write.
    pub(crate) fn answer(&mut self, request: &ReserveRequest, now: i64) -> Result<Option<Reservation>, Trouble> {
        let found = self.find_by(Sql::Answer, &request.key, now)?;
        let meeting = found.map(|found| found.meet(request, now));
        Ok(match meeting {
            // The answer to a repeated reservation contains the whole provenance, which this statement does not read.
            Some(Admission::Answer(Reservation::Granted { .. })) => None,
            Some(Admission::Answer(answer)) => Some(answer),
            _ => None,
        })
    }

    /// Returns the answer to `request` if the record is finished and its result is small.
    pub(super) fn replay(&mut self, request: &ReserveRequest, now: i64) -> Result<Option<Reservation>, Trouble> {
        let found = self.find_by(Sql::AnswerSmall, &request.key, now)?;
        Ok(match found.map(|found| found.meet(request, now)) {
            Some(Admission::Answer(answer @ Reservation::Finished { .. })) => Some(answer),
            _ => None,
        })
    }

    /// Writes a pending record. Returns false if an insert finds an existing row.
    fn put(
        &mut self,
        sql: Sql,
        key: &Key,
        record: &Record,
        is_first: bool,
        listed_in: Option<Duration>,
        now: i64,
    ) -> rusqlite::Result<bool> {
        let Parts {
            format,
            state,
            owner,
            attempt,
            attempts_used,
            fingerprint,
            on_crash_fail,
            begun,
            lease_ms,
            ttl_ms,
            holder,
            traceparent,
            decided_by,
            decided_reason,
            result: journal,
            ..
        } = Parts::of(record);
        // The times of the record. An `Insert` also sets `listed_at`; a `Replace` does not change `listed_at`.
        let first_seen_at = is_first.then_some(now);
        let lapses_at = lease_ms.map(|ms| now.saturating_add(ms));
        let expires_at = after(now, record.retention(Duration::ZERO));
        // If the attempt finishes as planned, the record expires no earlier than `listed_at`, so the completion changes
        // no index.
        let listed_at = listed_in.map(|ttl| after(now, ttl));
        // `Replace` has the same parameters as `Insert`, but the journal in place of `listed_at`.
        let journal = journal.as_deref();
        let last: &dyn ToSql = if listed_at.is_some() { &listed_at } else { &journal };
        let columns: [&dyn ToSql; 20] = [
            &key.as_str(),
            &owner,
            &format,
            &state,
            &attempt,
            &attempts_used,
            &fingerprint,
            &on_crash_fail,
            &lease_ms,
            &ttl_ms,
            &lapses_at,
            &expires_at,
            &holder,
            &traceparent,
            &decided_by,
            &decided_reason,
            &now,
            &first_seen_at,
            &begun,
            last,
        ];
        Ok(self.sql(sql)?.execute(&columns[..])? == 1)
    }

    /// Ends the attempt with a result.
    pub(crate) fn finish(&mut self, lease: &Lease, finish: &Finish, now: i64) -> Result<Verdict, Trouble> {
        let bytes = finish.result().stored_bytes();
        if bytes > MAX_RESULT_BYTES {
            return Err(Trouble::TooLarge(bytes));
        }
        let record = Record::after(lease, finish.state());
        let Parts { state, owner, attempt, codec, result_bytes, result, .. } = Parts::of(&record);
        let (key, expires_at) = (lease.key.as_str(), after(now, lease.ttl));
        let columns = params![key, owner, now, attempt, state, expires_at, codec, result_bytes, result.as_deref()];
        match self.sql(Sql::Finish)?.execute(columns)? {
            0 => self.ended(lease, true, now),
            _ => Ok(Verdict::Applied),
        }
    }

    /// Ends the attempt without a result.
    pub(crate) fn release(&mut self, lease: &Lease, release: Release, now: i64) -> Result<Verdict, Trouble> {
        let (key, owner, expires_at) = (lease.key.as_str(), &lease.owner.as_bytes()[..], after(now, lease.ttl));
        let refund = i64::from(!release.counts());
        let columns = params![key, owner, now, release.state().name(), expires_at, refund];
        match self.sql(Sql::Release)?.execute(columns)? {
            0 => self.ended(lease, false, now),
            _ => Ok(Verdict::Applied),
        }
    }

    /// Returns the answer to a write that found no pending record of its attempt.
    fn ended(&mut self, lease: &Lease, with_result: bool, now: i64) -> Result<Verdict, Trouble> {
        let found = self.find(&lease.key, now)?;
        Ok(found.map_or(Verdict::Refused, |found| found.record.ended(lease, with_result)))
    }

    /// Writes into the record that the body begins, and renews the lease.
    pub(crate) fn begin(&mut self, lease: &Lease, now: i64) -> Result<Verdict, Trouble> {
        self.keep(Sql::Begin, lease, now)
    }

    /// Restarts the lease and the retention.
    pub(crate) fn renew(&mut self, lease: &Lease, now: i64) -> Result<Verdict, Trouble> {
        self.keep(Sql::Renew, lease, now)
    }

    /// Puts the journal into the record, and restarts the lease and the retention.
    pub(crate) fn append(&mut self, lease: &Lease, journal: &Journal, now: i64) -> Result<Verdict, Trouble> {
        let journal = &journal.bytes()[..];
        if journal.len() > MAX_RESULT_BYTES {
            return Err(Trouble::TooLarge(journal.len()));
        }
        let (key, owner, lapses_at) = (lease.key.as_str(), &lease.owner.as_bytes()[..], after(now, lease.duration));
        let columns = params![key, owner, now, lease.attempt, lapses_at, after(lapses_at, lease.ttl), journal];
        let kept = self.sql(Sql::Append)?.execute(columns)?;
        Ok(if kept == 1 { Verdict::Applied } else { Verdict::Refused })
    }

    fn keep(&mut self, sql: Sql, lease: &Lease, now: i64) -> Result<Verdict, Trouble> {
        let (key, owner, lapses_at) = (lease.key.as_str(), &lease.owner.as_bytes()[..], after(now, lease.duration));
        let columns = params![key, owner, now, lease.attempt, lapses_at, after(lapses_at, lease.ttl)];
        let kept = self.sql(sql)?.execute(columns)?;
        Ok(if kept == 1 { Verdict::Applied } else { Verdict::Refused })
    }

    /// Applies the decision of an operator.
    pub(crate) fn decide(&mut self, decision: &Decision, now: i64) -> Result<DecisionAnswer, Trouble> {
        let bytes = decision.stored_bytes();
        if bytes > MAX_RESULT_BYTES {
            return Err(Trouble::TooLarge(bytes));
        }
        let key = decision.key.as_str();
        let Some(found) = self.inspect(&decision.key, now)? else { return Ok(DecisionAnswer::NoRecord) };
        match found.decide(decision) {
            Ruling::Answer(refused) => return Ok(refused),
            Ruling::Replace(record) => {
                let parts = Parts::of(&record);
                let Parts { state, owner, attempts_used, codec, result_bytes, decided_by, decided_reason, .. } = parts;
                let result = parts.result.as_deref();
                let columns =
                    params![key, owner, state, attempts_used, codec, result_bytes, result, decided_by, decided_reason];
                self.sql(Sql::Decide)?.execute(columns)?;
            }
            Ruling::Remove => {
                self.sql(Sql::Forget)?.execute([key])?;
            }
        }
        Ok(DecisionAnswer::Applied)
    }

    /// Returns the record as an operator sees it.
    pub(crate) fn inspect(&mut self, key: &Key, now: i64) -> Result<Option<Inspection>, Trouble> {
        match self.find(key, now) {
            Err(Trouble::Format(why)) => self.damaged(key, why).map(Some),
            found => Ok(found?.map(|found| found.inspection(now))),
        }
    }

    /// Returns the unreadable row of `key`, with a digest of all its columns.
    fn damaged(&mut self, key: &Key, why: FormatError) -> Result<Inspection, Trouble> {
        let mut rows = self.sql(Sql::Stored)?.query([key.as_str()])?;
        let mut stored = Vec::with_capacity(COLUMNS.len());
        if let Some(row) = rows.next()? {
            for at in 0..COLUMNS.len() {
                stored.push(raw(row.get_ref(at)?));
            }
        }
        Ok(Inspection::damaged(why.to_string(), stored))
    }

    /// Lists the records in the order of their keys, starting after the cursor. A cursor is a key.
    pub(super) fn list(&mut self, filter: &Filter, now: i64) -> Result<Page, Trouble> {
        let prefix = filter.prefix();
        let after = filter.after.as_ref().map_or("", Cursor::as_str).max(&prefix);
        // First string that sorts after every key with this prefix: the prefix ends with `/`, and `0` follows `/`.
        let end = format!("{}0", &prefix[..prefix.len() - 1]);
        let mut page = Page::default();
        let mut rows = self.sql(if filter.undecided { Sql::ListUndecided } else { Sql::List })?.query([after, &end])?;
        let mut looked = 0;
        let mut last = String::new();
        while let Some(row) = rows.next()? {
            if looked == LOOKED_AT || page.records.len() == filter.most() {
                page.next = Some(Cursor::new(last));
                break;
            }
            looked += 1;
            last = row.get_ref(KEY_AT)?.as_bytes().map(|key| String::from_utf8_lossy(key).into_owned())?;
            let found = match read(row, now) {
                Err(Trouble::Sqlite(error)) => return Err(error.into()),
                Err(Trouble::Format(why)) => Ok(Some(Inspection::unexamined(&why))),
                found => found.map(|found| found.map(|found| found.inspection(now))),
            };
            page.add(filter, &last, found);
        }
        drop(rows);
        for key in page.damaged() {
            let now = self.inspect(&key, now)?;
            page.show(filter, &key, now);
        }
        Ok(page)
    }

    /// Checks that the table has its columns, and can be read.
    pub(super) fn ping(&mut self) -> Result<(), Trouble> {
        self.sql(Sql::Ping)?.exists([])?;
        Ok(())
    }

    /// Returns the record of `key`, unless its retention has ended.
    fn find(&mut self, key: &Key, now: i64) -> Result<Option<FoundRow>, Trouble> {
        self.find_by(Sql::Select, key, now)
    }

    fn find_by(&mut self, sql: Sql, key: &Key, now: i64) -> Result<Option<FoundRow>, Trouble> {
        let mut rows = self.sql(sql)?.query([key.as_str()])?;
        match rows.next()? {
            Some(row) => read(row, now),
            None => Ok(None),
        }
    }

    /// Visits up to `limit` rows whose `listed_at` has passed. Removes the rows whose retention has ended, and returns
    /// their number. Gives the other rows a new `listed_at`: most of these rows were renewed or finished after their
    /// `listed_at` was set.
    pub(crate) fn clean_up(&mut self, now: i64, limit: u32) -> rusqlite::Result<u64> {
        let due = self.sql(Sql::Due)?.query_map([now], |row| row.get::<_, Value>(0))?;
        let due = due.take(usize::try_from(limit).unwrap_or(usize::MAX)).collect::<rusqlite::Result<Vec<_>>>()?;
        let mut removed = 0;
        for key in due {
            match self.sql(Sql::Delete)?.execute(params![key, now])? {
                0 => {
                    self.sql(Sql::Relist)?.execute(params![key, now, now.saturating_add(NOT_OURS)])?;
                }
                _ => removed += 1,
            }
        }
        Ok(removed)
    }
}

/// Returns the type and the bytes of a value.
fn raw(value: ValueRef<'_>) -> Vec<u8> {
    let (kind, bytes): (u8, &[u8]) = match value {
        ValueRef::Null => (0, &[]),
        ValueRef::Integer(number) => (1, &number.to_be_bytes()),
        ValueRef::Real(number) => (2, &number.to_be_bytes()),
        ValueRef::Text(text) => (3, text),
        ValueRef::Blob(blob) => (4, blob),
    };
    [&[kind], bytes].concat()
}

fn flag(value: ValueRef<'_>) -> Result<bool, Trouble> {
    match value.as_i64()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(FormatError::Damaged.into()),
    }
}

/// Decodes the record in a row; `None` if its retention has ended. A row of another version is never treated as
/// expired.
fn read(row: &Row<'_>, now: i64) -> Result<Option<FoundRow>, Trouble> {
    let column = |index| row.get_ref(index);
    let format = column(0)?.as_i64()?;
    let expires_at = column(1)?.as_i64()?;
    if format == Parts::VERSION && expires_at <= now {
        return Ok(None);
    }
    // Reads the columns that need a conversion for `Parts`. Only a full look-up has the columns from `REST_AT` on.
    let on_crash_fail = flag(column(7)?)?;
    let begun = flag(column(13)?)?;
    let lapses_at = column(10)?.as_i64_or_null()?;
    let columns = row.as_ref().column_count();
    let text = |index| Ok::<_, Trouble>(column(index)?.as_str_or_null()?);
    let ([holder, decided_by, decided_reason], first_seen_at) = match columns > REST_AT {
        true => ([text(REST_AT)?, text(REST_AT + 1)?, text(REST_AT + 2)?], Some(column(REST_AT + 3)?.as_i64()?)),
        false => ([None; 3], None),
    };
    let parts = Parts {
        format,
        state: column(2)?.as_str()?,
        owner: column(3)?.as_blob()?,
        attempt: column(4)?.as_i64()?,
        attempts_used: column(5)?.as_i64()?,
        fingerprint: column(6)?.as_blob_or_null()?,
        on_crash_fail,
        begun,
        lease_ms: column(8)?.as_i64_or_null()?,
        ttl_ms: column(9)?.as_i64_or_null()?,
        holder,
        traceparent: text(11)?,
        decided_by,
        decided_reason,
        codec: text(14)?,
        result_bytes: column(15)?.as_i64_or_null()?,
        result: column(RESULT_AT)?.as_blob_or_null()?.map(Bytes::copy_from_slice),
        reading: match columns > SIZE_AT {
            true => {
                ReadExtent::WithoutResult(column(SIZE_AT)?.as_i64_or_null()?.and_then(|size| u64::try_from(size).ok()))
            }
            false => ReadExtent::Whole,
        },
    };
    let began_at = column(12)?.as_i64()?;
    let record = parts.record()?;
    // A pending record has a `lapses_at`, and a record that is not pending has none.
    if record.is_pending() != lapses_at.is_some() {
        return Err(FormatError::Damaged.into());
    }
    Ok(Some(FoundRow { record, lapses_at, expires_at, first_seen_at, began_at }))
}
