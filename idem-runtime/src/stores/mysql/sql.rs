//! The statements, and the reading of their rows. No other file depends on the columns of the table.
//!
//! The time of a statement is the moment at which the server began it (`utc_timestamp(6)`), in microseconds since 1970.
//! The servers take that time before a statement waits for a lock. So after a wait the time is too early, and every
//! comparison then errs to the safe side: a lease that lapsed meanwhile still counts as live, and a new lease lapses
//! earlier than its owner was promised by its own clock, which it read before it sent the statement.
//!
//! Every statement treats an expired record as absent, whether or not it was purged. No statement writes to a row of
//! another format. A statement about many records skips a row that another session has locked; its answer shows that
//! fewer rows were written. A statement about one record waits for the lock, for `innodb_lock_wait_timeout`.
//!
//! The servers have no arrays. A statement about many records repeats a part of its text for each record, and is
//! prepared for 2, 4, 8, … records; records that do not exist fill the rest.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;

use crate::kit::rows::{FoundRow, Micros, millis, number_of, stored_length};
use crate::kit::work::Effect;
use crate::record::format::FormatError;
use crate::record::{
    Action, Decision, DecisionAnswer, Inspection, Journal, Lease, Parts, ReadExtent, Record, ReserveRequest, Ruling,
    StoredResult,
};
use crate::store::{Cursor, Filter, Page, StoreError, StoreErrorKind};

/// Default name of the table.
pub(super) const TABLE: &str = "idem_records";
/// Version of the table. The comment on the table begins with this text.
pub(super) const TABLE_VERSION: &str = "idem 1";
/// Longest name of a table, in bytes.
pub(super) const MAX_TABLE_BYTES: usize = 64;
/// Largest number of partitions of a table.
pub(super) const MAX_PARTITIONS: u16 = 1024;
/// Largest number of records in one statement.
pub(super) const AT_ONCE: usize = 64;
/// Space in a message of the protocol that a record takes in addition to its result, in bytes.
const OTHER_COLUMNS: usize = 16 * 1024;
/// Size of a result or of a journal, in bytes, above which a statement that reads many records leaves it out, to limit
/// the size of its answer. A separate statement then reads each such record.
pub(super) const IN_A_BATCH: usize = 4096;
/// Size of a result or of a journal, in bytes, above which it has a statement of its own: MySQL gives such a column of
/// a derived table 65 535 bytes.
pub(super) const MOST_SHARED: usize = 60_000;
/// Largest number of rows that one page of a list reads.
const LOOKED_AT: usize = 2000;
const VERSION: i64 = Parts::VERSION;

/// Statement that creates the table, also for users who run their own migrations.
const DDL: &str = include_str!("schema.sql");

/// Returns the statement of [`DDL`] for a table of this name, with this number of partitions (0: a plain table).
pub(super) fn ddl(table: &str, partitions: u16) -> String {
    let ddl = DDL.replace(&format!("`{TABLE}`"), &quoted(table));
    match partitions {
        0 => ddl,
        partitions => {
            let end = format!("COMMENT = '{TABLE_VERSION}'");
            ddl.replace(&end, &format!("{end}\nPARTITION BY KEY (`key`) PARTITIONS {partitions}"))
        }
    }
}

/// Returns a name as a quoted identifier.
pub(super) fn quoted(name: &str) -> String {
    format!("`{}`", name.replace('`', "``"))
}

/// Limit of the size of a record, which the server's `max_allowed_packet` sets.
#[derive(Clone, Copy, Debug)]
pub(super) struct SizeLimit(pub(super) usize);

impl SizeLimit {
    /// Refuses a result that the server would not accept.
    pub(super) fn check_result(self, result: &StoredResult) -> Result<(), StoreError> {
        self.check("result", result.stored_bytes())
    }

    /// Refuses a journal that the server would not accept.
    pub(super) fn check_journal(self, journal: &Journal) -> Result<(), StoreError> {
        self.check("journal", journal.bytes().len())
    }

    /// Refuses a decision whose result or journal the server would not accept.
    pub(super) fn check_decision(self, decision: &Decision) -> Result<(), StoreError> {
        match &decision.action {
            Action::ReopenWith(Some(journal)) => self.check_journal(journal),
            _ => decision.result().map_or(Ok(()), |result| self.check_result(result)),
        }
    }

    fn check(self, value: &str, bytes: usize) -> Result<(), StoreError> {
        let most = self.0.saturating_sub(OTHER_COLUMNS);
        if bytes > most {
            let message =
                format!("the {value} has {bytes} bytes; with its `max_allowed_packet` the server takes {most}");
            return Err(StoreError::new(StoreErrorKind::TooLarge, message));
        }
        Ok(())
    }
}

/// A parameter of a statement. Has no text, because parameters must not reach logs.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Param {
    Null,
    Int(i64),
    Bytes(Vec<u8>),
}

impl Param {
    /// Returns the bytes of a key; empty for other values.
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Null | Self::Int(_) => &[],
        }
    }
}

impl From<i64> for Param {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<bool> for Param {
    fn from(is: bool) -> Self {
        Self::Int(is.into())
    }
}

impl From<&[u8]> for Param {
    fn from(bytes: &[u8]) -> Self {
        Self::Bytes(bytes.to_vec())
    }
}

impl From<&str> for Param {
    fn from(text: &str) -> Self {
        text.as_bytes().into()
    }
}

impl<T: Into<Self>> From<Option<T>> for Param {
    fn from(value: Option<T>) -> Self {
        value.map_or(Self::Null, Into::into)
    }
}

/// A value in a row, of any driver.
#[derive(Clone, PartialEq, Eq)]
pub(super) enum Cell {
    /// No value.
    Null,
    /// A number.
    Int(i64),
    /// A text, or other bytes.
    Bytes(Bytes),
    /// A value that no column of the table holds.
    Other,
}

/// The values of a row, of any driver.
pub struct Row(pub(super) Vec<Cell>);

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Row").field("cells", &self.0.len()).finish_non_exhaustive()
    }
}

impl Row {
    fn cell(&self, at: usize) -> Result<&Cell, FormatError> {
        self.0.get(at).ok_or(FormatError::Damaged)
    }

    pub(super) fn int(&self, at: usize) -> Result<Option<i64>, FormatError> {
        match self.cell(at)? {
            Cell::Null => Ok(None),
            Cell::Int(number) => Ok(Some(*number)),
            // Statements without parameters return numbers as texts.
            Cell::Bytes(text) => {
                let number = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
                number.map(Some).ok_or(FormatError::Damaged)
            }
            Cell::Other => Err(FormatError::Damaged),
        }
    }

    fn number(&self, at: usize) -> Result<i64, FormatError> {
        self.int(at)?.ok_or(FormatError::Damaged)
    }

    pub(super) fn bytes(&self, at: usize) -> Result<Option<&Bytes>, FormatError> {
        match self.cell(at)? {
            Cell::Null => Ok(None),
            Cell::Bytes(bytes) => Ok(Some(bytes)),
            Cell::Int(_) | Cell::Other => Err(FormatError::Damaged),
        }
    }

    pub(super) fn text(&self, at: usize) -> Result<Option<&str>, FormatError> {
        let text = self.bytes(at)?.map(|bytes| std::str::from_utf8(bytes)).transpose();
        text.map_err(|_| FormatError::Damaged)
    }

    /// Returns the key of a row that has the columns [`COLUMNS`].
    pub(super) fn key(&self) -> Option<&[u8]> {
        self.bytes(KEY_AT).ok().flatten().map(|key| &key[..])
    }

    /// Returns whether the statement left out the result or the journal of the row.
    pub(super) fn is_left_out(&self) -> bool {
        matches!(self.int(LENGTH_AT), Ok(Some(length)) if usize::try_from(length).is_ok_and(|length| length > IN_A_BATCH))
    }
}

/// The columns that every statement about records returns, in this order.
const COLUMNS: [&str; 24] = [
    "format",
    "state",
    "owner",
    "attempt",
    "attempts_used",
    "fingerprint",
    "on_crash_fail",
    "lease_ms",
    "ttl_ms",
    "codec",
    "result",
    "result_bytes",
    "lapses_at",
    "expires_at",
    "listed_at",
    "began_at",
    "traceparent",
    "decided_by",
    "decided_reason",
    "begun",
    "holder",
    "first_seen_at",
    "key",
    "result_length",
];
const RESULT_AT: usize = 10;
const KEY_AT: usize = 22;
const LENGTH_AT: usize = 23;
/// Index of the server's time, which follows [`COLUMNS`].
const NOW_AT: usize = 24;
/// Number of columns that are stored. The others, the length of the result and the time, follow from these.
const STORED: usize = 23;

/// The server's time in microseconds since 1970. `utc_timestamp` does not depend on the time zone of the session.
const NOW: &str = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))";

/// Reads the record in a row.
///
/// # Errors
/// If the row is no record.
pub(super) fn found(row: &Row, reading: ReadExtent) -> Result<FoundRow, FormatError> {
    let time = |at: usize| row.number(at).map(Micros);
    let now = time(NOW_AT)?;
    let is = |at: usize| row.number(at).map(|number| number != 0);
    let parts = Parts {
        reading,
        format: row.number(0)?,
        state: row.text(1)?.ok_or(FormatError::Damaged)?,
        owner: row.bytes(2)?.ok_or(FormatError::Damaged)?,
        attempt: row.number(3)?,
        attempts_used: row.number(4)?,
        fingerprint: row.bytes(5)?.map(|bytes| &bytes[..]),
        on_crash_fail: is(6)?,
        lease_ms: row.int(7)?,
        ttl_ms: row.int(8)?,
        codec: row.text(9)?,
        result: row.bytes(RESULT_AT)?.cloned(),
        result_bytes: row.int(11)?,
        traceparent: row.text(16)?,
        decided_by: row.text(17)?,
        decided_reason: row.text(18)?,
        begun: is(19)?,
        holder: row.text(20)?,
    };
    let record = parts.record()?;
    let (lapses_at, expires_at) = (time(12)?, time(13)?);
    Ok(FoundRow { record, lapses_at, expires_at, now, first_seen_at: Some(time(21)?), began_at: time(15)? })
}

/// A row as an operator sees it, and the parameters of the statement that forgets the row if it can't be read.
pub(super) struct RowReport {
    pub(super) inspection: Inspection,
    pub(super) stored: Vec<Param>,
}

/// Reads a row as an operator sees it, unless its record has expired.
pub(super) fn examine(row: &Row) -> Option<RowReport> {
    let param = |at: usize| match (row.cell(at), STORED_COLUMNS[at].1) {
        // Statements without parameters return numbers as texts.
        (Ok(_), Kind::Int) => row.int(at).ok().flatten().map_or(Param::Null, Param::Int),
        (Ok(Cell::Int(number)), _) => Param::Int(*number),
        (Ok(Cell::Bytes(bytes)), _) => Param::Bytes(bytes.to_vec()),
        _ => Param::Null,
    };
    let stored: Vec<Param> = (0..STORED).map(param).collect();
    let inspection = match found(row, ReadExtent::Whole) {
        Ok(found) if found.is_expired() => return None,
        Ok(found) => found.inspection(),
        Err(why) => {
            let bytes = |param: &Param| match param {
                Param::Null => Vec::new(),
                Param::Int(number) => number.to_string().into_bytes(),
                Param::Bytes(bytes) => bytes.clone(),
            };
            Inspection::damaged(why.to_string(), stored.iter().map(bytes))
        }
    };
    Some(RowReport { inspection, stored })
}

/// A statement, whose text repeats a part for each of its rows.
#[derive(Debug)]
pub(super) struct Statement {
    /// Index of this statement among all statements.
    pub(super) place: usize,
    head: String,
    row: String,
    between: &'static str,
    tail: String,
    /// For each `?` of `row`, the index of its value in the parameters of a row.
    order: Vec<usize>,
    /// Rows that fill the statement up to a number for which it is prepared.
    filler: Filler,
    /// True if the statement writes nothing unless it can write the records of all its rows.
    pub(super) is_all_or_none: bool,
}

/// Index of the number of rows among the parameters of a row.
const ROWS: usize = usize::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Filler {
    /// The statement has one row.
    None,
    /// The last row again: the server finds its record, and changes nothing.
    LastRow,
    /// A row of nulls with an empty key, which no record has.
    NoKey,
}

impl Statement {
    /// Returns the text for `count` rows.
    pub(super) fn text(&self, count: usize) -> String {
        let mut text = self.head.clone();
        for at in 0..count {
            if at > 0 {
                text += self.between;
            }
            text += &self.row;
        }
        text + &self.tail
    }

    /// Returns the number of rows for which the statement is prepared, and the parameters in the order of their `?`.
    pub(super) fn params(&self, rows: &[Vec<Param>]) -> (usize, Vec<Param>) {
        let count = match self.filler {
            Filler::None => 1,
            _ => rows.len().next_power_of_two(),
        };
        let mut params = Vec::with_capacity(count * self.order.len());
        let number_of_rows = || Param::Int(i64::try_from(rows.len()).unwrap_or(i64::MAX));
        let last = rows.last().map_or(&[][..], |row| &row[..]);
        for at in 0..count {
            let row = rows.get(at);
            params.extend(self.order.iter().map(|param| match (row, *param) {
                (Some(_), ROWS) => number_of_rows(),
                (Some(row), param) => row[param].clone(),
                (None, 0) if self.filler == Filler::NoKey => "".into(),
                (None, _) if self.filler == Filler::NoKey => Param::Null,
                (None, param) => last[param].clone(),
            }));
        }
        (count, params)
    }
}

/// Returns the `text` of a statement with its values in place of each `?`. No text of a statement has a `?` elsewhere.
pub(super) fn inline(text: &str, params: &[Param]) -> String {
    let mut parts = text.split('?');
    let mut inlined = parts.next().unwrap_or_default().to_owned();
    for (param, part) in params.iter().zip(parts) {
        match param {
            Param::Null => inlined += "NULL",
            Param::Int(number) => inlined += &number.to_string(),
            Param::Bytes(bytes) => {
                inlined += "x'";
                inlined.extend(digits(bytes).map(char::from));
                inlined += "'";
            }
        }
        inlined += part;
    }
    inlined
}

/// Kind of a parameter. Each is converted, so that the server neither guesses its type nor reads bytes as a text.
#[derive(Clone, Copy)]
enum Kind {
    Bytes,
    /// Bytes that are no text, sent as hexadecimal digits: MySQL shows running statements with their parameters, and
    /// its list of sessions fails if a parameter is not UTF-8.
    Hex,
    Int,
}

use Kind::{Bytes as B, Hex as H, Int as I};

/// Names and kinds of the parameters of a row of a statement. The key is the first.
type Shape = &'static [(&'static str, Kind)];

const KEY: Shape = &[("key", B)];
const RESERVE: Shape = &[
    ("key", B),
    ("owner", H),
    ("fingerprint", H),
    ("on_crash_fail", I),
    ("lease_ms", I),
    ("ttl_ms", I),
    ("holder", B),
    ("traceparent", B),
];
const ATTEMPT: Shape = &[("key", B), ("owner", H), ("attempt", I)];
const APPEND: Shape = &[("key", B), ("owner", H), ("attempt", I), ("journal", B), ("journal_length", I)];
const END: Shape = &[
    ("key", B),
    ("owner", H),
    ("state", B),
    ("refund", I),
    ("codec", B),
    ("result", B),
    ("result_bytes", I),
    ("ttl_ms", I),
    ("attempt", I),
];
const REPLACE: Shape = &[
    ("key", B),
    ("owner", H),
    ("fingerprint", H),
    ("on_crash_fail", I),
    ("lease_ms", I),
    ("ttl_ms", I),
    ("attempt", I),
    ("attempts_used", I),
    ("holder", B),
    ("traceparent", B),
    ("decided_by", B),
    ("decided_reason", B),
    ("begun", I),
    ("is_expired", I),
    ("seen_owner", H),
    ("seen_attempt", I),
    ("seen_state", B),
    ("seen_begun", I),
    ("seen_length", I),
];
/// The record that a decision saw, after its key.
const SEEN: Shape = &[
    ("key", B),
    ("seen_owner", H),
    ("seen_attempt", I),
    ("seen_state", B),
    ("seen_attempts_used", I),
    ("seen_begun", I),
    ("may_live", I),
];
const DECIDE: Shape = &[
    ("key", B),
    ("seen_owner", H),
    ("seen_attempt", I),
    ("seen_state", B),
    ("seen_attempts_used", I),
    ("seen_begun", I),
    ("may_live", I),
    ("seen_length", I),
    ("changes_journal", I),
    ("owner", H),
    ("state", B),
    ("attempts_used", I),
    ("codec", B),
    ("result", B),
    ("result_bytes", I),
    ("decided_by", B),
    ("decided_reason", B),
];
const LIST: Shape = &[("after", B), ("end", B), ("limit", I)];
const PURGE: Shape = &[("limit", I)];

/// Replaces each `{name}` of `template` by a parameter of `shape`, and `{rows}` by the number of rows. Returns the
/// text, and the index of each parameter.
fn plain(template: &str, shape: Shape) -> (String, Vec<usize>) {
    let (mut text, mut order) = (String::new(), Vec::new());
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (name, after) = after.split_once('}').expect("a name ends");
        let (at, kind) = match name {
            "rows" => (ROWS, I),
            _ => {
                let at = shape.iter().position(|(of, _)| *of == name).expect("a parameter of the statement");
                (at, shape[at].1)
            }
        };
        text += before;
        text += match (name, kind) {
            // The servers take nothing but a bare parameter as a limit.
            ("limit", _) => "?",
            (_, B) => "CAST(? AS BINARY)",
            (_, H) => "UNHEX(?)",
            (_, I) => "CAST(? AS SIGNED)",
        };
        order.push(at);
        rest = after;
    }
    (text + rest, order)
}

/// Replaces each `{name}` of `template` by a column of the rows `u`.
fn joined(template: &str) -> String {
    template.replace('{', "u.`").replace('}', "`")
}

/// All statements about records. The comment on a statement names its parameters.
#[derive(Debug)]
pub(super) struct Statements {
    /// Returns the record of the key, if there is a record. Parameters: [`KEY`].
    pub(super) look: Statement,
    /// Works like `look`, and holds the row against writes until the transaction of the user ends.
    pub(super) look_held: Statement,
    /// Works like `look_held`, but fails immediately if another session has locked the row.
    pub(super) look_free: Statement,
    /// Returns the records of the keys, without results and journals of more than [`IN_A_BATCH`] bytes.
    pub(super) look_many: Statement,
    /// Makes a record, and fails if there is one. Parameters: [`RESERVE`].
    pub(super) reserve: Statement,
    /// Makes the records that do not exist. Parameters: [`RESERVE`].
    pub(super) reserve_many: Statement,
    /// Makes a record unless there is one, and returns the record of the key. Only MariaDB has this statement.
    pub(super) reserve_returning: Statement,
    /// Works like `reserve_returning` for many records, as `look_many` returns them.
    pub(super) reserve_many_returning: Statement,
    /// Replaces a record by the record of a new attempt, if the replaced record is unchanged since it was read. The
    /// journal stays, unless the replaced record has expired. Parameters: [`REPLACE`].
    pub(super) replace: Statement,
    /// Ends an attempt. A release keeps the journal, a result replaces it. Parameters: [`END`].
    pub(super) end: Statement,
    pub(super) end_many: Statement,
    /// Renews a lease if the server has no room for `renew_many`. Parameters: [`ATTEMPT`].
    pub(super) renew: Statement,
    /// Renews leases. Skips locked rows even if there is only one. Parameters: [`ATTEMPT`].
    pub(super) renew_many: Statement,
    /// Renews a lease, and notes that the body of the attempt begins. Parameters: [`ATTEMPT`].
    pub(super) begin: Statement,
    pub(super) begin_many: Statement,
    /// Renews a lease, and puts a journal into the record, unless the record has a journal of the same length or a
    /// longer one. Parameters: [`APPEND`].
    pub(super) append: Statement,
    pub(super) append_many: Statement,
    /// Returns the records whose leases their attempts still hold. Parameters: [`ATTEMPT`].
    pub(super) held_many: Statement,
    /// Returns the records that are pending, as `look_many` returns them. Parameters: [`KEY`].
    pub(super) pending_many: Statement,
    /// Replaces a record by an operator's decision, if the record is unchanged since it was read. Parameters:
    /// [`DECIDE`].
    pub(super) decide: Statement,
    /// Removes a record, if the record is unchanged since it was read. Parameters: [`SEEN`].
    pub(super) forget: Statement,
    /// Removes a row if all of its columns are unchanged since it was read. Parameters: the stored columns.
    pub(super) forget_damaged: Statement,
    /// Returns the keys of rows whose `listed_at` has passed. Parameters: [`PURGE`].
    pub(super) due: Statement,
    /// Deletes expired rows. Parameters: [`KEY`].
    pub(super) delete_many: Statement,
    /// Moves the `listed_at` of renewed rows. Parameters: [`KEY`].
    pub(super) relist_many: Statement,
    /// Returns the records in a range of keys, without results. Parameters: [`LIST`].
    pub(super) list: Statement,
    /// Like `list`, for records that wait for a decision.
    pub(super) list_undecided: Statement,
    /// Fails if the table or a column is missing, or if the login may not read it.
    pub(super) ping: Statement,
}

/// The texts of which statements are made.
struct Texts {
    table: String,
    place: usize,
}

impl Texts {
    fn columns(of: &str) -> String {
        let columns = COLUMNS.map(|column| format!("{of}`{column}`"));
        format!("{}, {NOW}", columns.join(", "))
    }

    /// Returns the columns, without large results.
    fn bounded(of: &str) -> String {
        let result = format!("{of}`result`");
        let bounded = format!("CASE WHEN {of}`result_length` > {IN_A_BATCH} THEN NULL ELSE {result} END");
        Self::columns(of).replacen(&result, &bounded, 1)
    }

    fn place(&mut self) -> usize {
        self.place += 1;
        self.place
    }

    /// Makes a statement about one record.
    fn one(&mut self, template: &str, shape: Shape) -> Statement {
        let (row, order) = plain(template, shape);
        let (head, between, tail, filler) = (String::new(), "", String::new(), Filler::None);
        Statement { place: self.place(), head, row, between, tail, order, filler, is_all_or_none: false }
    }

    /// Makes a statement whose rows are listed between `head` and `tail`.
    fn many(&mut self, head: String, row: &str, shape: Shape, tail: String, filler: Filler) -> Statement {
        let (row, order) = plain(row, shape);
        Statement { place: self.place(), head, row, between: ", ", tail, order, filler, is_all_or_none: false }
    }

    /// Makes the statements `UPDATE … SET {set} WHERE {condition}` about one record, and about many.
    fn update(&mut self, set: &str, condition: &str, shape: Shape) -> (Statement, Statement) {
        let tail = format!("{} SET {} WHERE {}", self.by_key(), joined(set), joined(condition));
        (self.update_one(set, condition, shape), self.joining("UPDATE ", shape, &tail, Locks::Free))
    }

    /// Makes statements like [`update`](Self::update), where the one about many writes nothing unless it can write all
    /// its records.
    fn update_all_or_none(&mut self, set: &str, condition: &str, shape: Shape) -> (Statement, Statement) {
        let tail = format!("{} SET {} WHERE u.`writable` = u.`rows`", self.by_key(), joined(set));
        let free = format!(" WHERE {}", joined(condition).replace("r.`", "f.`"));
        (self.update_one(set, condition, shape), self.joining("UPDATE ", shape, &tail, Locks::FreeAnd(&free)))
    }

    fn update_one(&mut self, set: &str, condition: &str, shape: Shape) -> Statement {
        let text = format!("UPDATE {} AS r SET {set} WHERE r.`key` = {{key}} AND {condition}", self.table);
        self.one(&text, shape)
    }

    fn by_key(&self) -> String {
        format!(" STRAIGHT_JOIN {} AS r FORCE INDEX (PRIMARY) ON r.`key` = u.`key`", self.table)
    }

    /// Makes a statement that begins with `verb` and the rows `u`, of which `locks` selects some.
    ///
    /// The servers materialize the rows, because of the limit, and so lock the free rows first. The order of the join
    /// is fixed, so that each record is found by its key.
    fn joining(&mut self, verb: &str, shape: Shape, tail: &str, locks: Locks<'_>) -> Statement {
        let mut named: Vec<_> = shape.iter().map(|(name, _)| format!("{{{name}}} AS `{name}`")).collect();
        let (more, condition) = match locks {
            Locks::None => (None, ""),
            Locks::Free => (Some(""), ""),
            Locks::FreeAnd(condition) => {
                named.push("{rows} AS `rows`".to_owned());
                (Some(", count(*) OVER () AS `writable`"), condition)
            }
        };
        let (row, order) = plain(&format!("SELECT {}", named.join(", ")), shape);
        let (head, tail) = match more {
            Some(more) => {
                let free = format!(
                    ") AS u STRAIGHT_JOIN {} AS f FORCE INDEX (PRIMARY) ON f.`key` = u.`key`{condition} LIMIT 1000000 \
                     FOR UPDATE SKIP LOCKED) AS u{tail}",
                    self.table
                );
                (format!("{verb}(SELECT u.*{more} FROM ("), free)
            }
            None => (format!("{verb}("), format!(") AS u{tail}")),
        };
        let (filler, between) = (Filler::NoKey, " UNION ALL ");
        let is_all_or_none = matches!(locks, Locks::FreeAnd(_));
        Statement { place: self.place(), head, row, between, tail, order, filler, is_all_or_none }
    }
}

/// The records that a statement locks, and so its rows that remain.
#[derive(Clone, Copy)]
enum Locks<'a> {
    /// The statement locks no record before it writes, and all rows remain.
    None,
    /// Those that no other session has locked.
    Free,
    /// Those of [`Free`](Self::Free) that this condition selects. The rows have the number of `rows` of the statement,
    /// and the number of rows that are `writable`: those that remain.
    FreeAnd(&'a str),
}

impl Statements {
    /// Makes the statements for this table.
    #[expect(clippy::too_many_lines, reason = "one list, to be read together")]
    pub(super) fn new(table: &str) -> Self {
        let table = &quoted(table);
        let mut texts = Texts { table: table.clone(), place: 0 };
        let (all, bounded) = (Texts::columns("r."), Texts::bounded("r."));
        let there = format!("r.`format` = {VERSION} AND r.`expires_at` > {NOW}");
        let unfinished = "('pending', 'released', 'interrupted')";
        let insert = format!(
            "INSERT INTO {table} (`key`, `owner`, `fingerprint`, `on_crash_fail`, `lease_ms`, `ttl_ms`, `holder`, \
             `traceparent`, `format`, `state`, `attempt`, `attempts_used`, `first_seen_at`, `began_at`, `lapses_at`, \
             `expires_at`, `listed_at`) VALUES "
        );
        let values = format!(
            "({{key}}, {{owner}}, {{fingerprint}}, {{on_crash_fail}}, {{lease_ms}}, {{ttl_ms}}, {{holder}}, {{traceparent}}, \
             {VERSION}, 'pending', 1, 1, {NOW}, {NOW}, {NOW} + {{lease_ms}} * 1000, \
             {NOW} + ({{lease_ms}} + {{ttl_ms}}) * 1000, {NOW} + {{ttl_ms}} * 1000)"
        );
        // A repeated key changes nothing. Other mistakes, such as a text that is too long, stay errors.
        let keeps = " ON DUPLICATE KEY UPDATE `key` = `key`";
        let returning = format!("{keeps} RETURNING {}", Texts::columns(""));
        let returning_many = format!("{keeps} RETURNING {}", Texts::bounded(""));
        // A new attempt replaces a record that is unchanged since it was read, in three cases: the record has expired,
        // its lease has lapsed, or its attempt has ended. The caller of the new attempt gets the journal that was read,
        // so the statement also compares the length of the journal: an append changes neither owner nor attempt. An
        // expired record may have a result in place of a journal, and the new attempt gets neither. The servers assign
        // the columns from left to right, so no assignment reads a column that an earlier one has changed.
        let (replace, _) = texts.update(
            &format!(
                "r.`result` = CASE WHEN {{is_expired}} THEN NULL ELSE r.`result` END, \
                 r.`first_seen_at` = CASE WHEN {{is_expired}} THEN {NOW} ELSE r.`first_seen_at` END, \
                 r.`owner` = {{owner}}, r.`fingerprint` = {{fingerprint}}, r.`on_crash_fail` = {{on_crash_fail}}, \
                 r.`lease_ms` = {{lease_ms}}, r.`ttl_ms` = {{ttl_ms}}, r.`attempt` = {{attempt}}, \
                 r.`attempts_used` = {{attempts_used}}, r.`state` = 'pending', r.`begun` = {{begun}}, r.`codec` = NULL, \
                 r.`result_bytes` = NULL, r.`holder` = {{holder}}, r.`traceparent` = {{traceparent}}, \
                 r.`decided_by` = {{decided_by}}, r.`decided_reason` = {{decided_reason}}, r.`began_at` = {NOW}, \
                 r.`lapses_at` = {NOW} + {{lease_ms}} * 1000, \
                 r.`expires_at` = {NOW} + ({{lease_ms}} + {{ttl_ms}}) * 1000, \
                 r.`listed_at` = least(r.`listed_at`, {NOW} + {{ttl_ms}} * 1000)"
            ),
            &format!(
                "r.`format` = {VERSION} AND r.`owner` = {{seen_owner}} AND r.`attempt` = {{seen_attempt}} \
                 AND r.`state` = {{seen_state}} AND r.`begun` = {{seen_begun}} AND CASE WHEN {{is_expired}} \
                 THEN r.`expires_at` <= {NOW} ELSE r.`expires_at` > {NOW} \
                 AND (r.`state` <> 'pending' OR r.`lapses_at` <= {NOW}) \
                 AND coalesce(r.`result_length`, 0) = {{seen_length}} END"
            ),
            REPLACE,
        );
        // For a release, `attempt` is null: its caller may not know the attempt's number, so no number is compared. A
        // release keeps the journal for the next attempt. The result of a finished operation replaces the journal. A
        // repeated end writes nothing, and another attempt may reserve the key right after a release, so neither a
        // repetition nor a later look shows which ends of a batch were written: it is all of them, or none.
        let (end, end_many) = texts.update_all_or_none(
            &format!(
                "r.`result` = CASE WHEN {{state}} IN {unfinished} THEN r.`result` ELSE {{result}} END, \
                 r.`state` = {{state}}, r.`attempts_used` = greatest(r.`attempts_used` - {{refund}}, 0), \
                 r.`on_crash_fail` = ({{state}} = 'interrupted'), r.`begun` = 0, r.`lease_ms` = NULL, r.`ttl_ms` = NULL, \
                 r.`codec` = {{codec}}, r.`result_bytes` = {{result_bytes}}, r.`lapses_at` = {NOW}, \
                 r.`expires_at` = {NOW} + {{ttl_ms}} * 1000, \
                 r.`listed_at` = least(r.`listed_at`, {NOW} + {{ttl_ms}} * 1000)"
            ),
            &format!(
                "r.`owner` = {{owner}} AND r.`attempt` = coalesce({{attempt}}, r.`attempt`) AND r.`state` = 'pending' \
                 AND {there}"
            ),
            END,
        );
        // `greatest`: a delayed renewal must not shorten a lease that a later renewal has extended.
        let renewal = format!(
            "r.`lapses_at` = greatest(r.`lapses_at`, {NOW} + r.`lease_ms` * 1000), \
             r.`expires_at` = greatest(r.`expires_at`, {NOW} + (r.`lease_ms` + r.`ttl_ms`) * 1000)"
        );
        let held = format!("r.`owner` = {{owner}} AND r.`attempt` = {{attempt}} AND r.`state` = 'pending' AND {there}");
        let (renew, renew_many) = texts.update(&renewal, &held, ATTEMPT);
        // The condition reads the lease before the assignments change it. The statement marks a record only while its
        // lease is live, or again if the record is already marked: a late request must not mark a record.
        let (begin, begin_many) = texts.update(
            &format!("r.`begun` = 1, {renewal}"),
            &format!("{held} AND (r.`begun` = 1 OR r.`lapses_at` > {NOW})"),
            ATTEMPT,
        );
        // A longer journal is a later one: a late copy of an earlier request must not replace it.
        let (append, append_many) = texts.update(
            &format!(
                "r.`result` = CASE WHEN coalesce(r.`result_length`, 0) < {{journal_length}} THEN {{journal}} \
                 ELSE r.`result` END, {renewal}"
            ),
            &held,
            APPEND,
        );
        let held_many = format!("{} WHERE {}", texts.by_key(), joined(&held));
        let held_many = texts.joining(&format!("SELECT {bounded} FROM "), ATTEMPT, &held_many, Locks::None);
        // `may_live` is true if the decision also applies while the lease is live.
        let seen = format!(
            "r.`owner` = {{seen_owner}} AND r.`attempt` = {{seen_attempt}} AND r.`state` = {{seen_state}} \
             AND r.`attempts_used` = {{seen_attempts_used}} AND r.`begun` = {{seen_begun}} AND {there} \
             AND ({{may_live}} OR r.`state` <> 'pending' OR r.`lapses_at` <= {NOW})"
        );
        // A decision that does not finish the operation keeps the journal, to which the attempt may have appended since
        // the record was read. If the record has finished, its column holds a result, which must not become a journal.
        // A decision that changes the journal applies only to the journal that was read, of this length. Messages that
        // are marked as sent leave a finished record without another change, so a decision about it applies only to the
        // result that was read, of this length, too.
        let (decide, _) = texts.update(
            &format!(
                "r.`result` = CASE WHEN NOT {{changes_journal}} AND {{state}} IN {unfinished} \
                 AND {{seen_state}} IN {unfinished} THEN r.`result` ELSE {{result}} END, \
                 r.`owner` = {{owner}}, r.`state` = {{state}}, r.`attempts_used` = {{attempts_used}}, \
                 r.`codec` = {{codec}}, r.`result_bytes` = {{result_bytes}}, \
                 r.`on_crash_fail` = ({{state}} = 'interrupted'), r.`begun` = 0, r.`lease_ms` = NULL, r.`ttl_ms` = NULL, \
                 r.`decided_by` = {{decided_by}}, r.`decided_reason` = {{decided_reason}}"
            ),
            &format!(
                "{seen} AND ((NOT {{changes_journal}} AND r.`state` IN {unfinished}) \
                 OR coalesce(r.`result_length`, 0) = {{seen_length}})"
            ),
            DECIDE,
        );
        let forget = format!("DELETE FROM {table} WHERE `key` = {{key}} AND {}", seen.replace("r.`", "`"));
        let unchanged: Vec<_> = STORED_COLUMNS.iter().map(|(name, _)| format!("`{name}` <=> {{{name}}}")).collect();
        let forget_damaged = format!("DELETE FROM {table} WHERE `key` = {{key}} AND {}", unchanged.join(" AND "));
        let due = format!(
            "SELECT r.`key`, r.`expires_at` <= {NOW} FROM {table} AS r FORCE INDEX (`listed_at`) \
             WHERE r.`listed_at` <= {NOW} AND r.`format` = {VERSION} ORDER BY r.`listed_at` LIMIT {{limit}}"
        );
        let by_key = texts.by_key();
        let delete_many = format!("{by_key} WHERE r.`format` = {VERSION} AND r.`expires_at` <= {NOW}");
        let relist_many = format!(
            "{by_key} SET r.`listed_at` = r.`expires_at` WHERE r.`format` = {VERSION} AND r.`expires_at` > {NOW}"
        );
        let unread = Texts::columns("r.").replacen("r.`result`", "NULL", 1);
        let list = |index: &str, condition: &str| {
            format!(
                "SELECT {unread} FROM {table} AS r FORCE INDEX ({index}) WHERE {condition}r.`key` > {{after}} \
                 AND r.`key` < {{end}} ORDER BY r.`key` LIMIT {{limit}}"
            )
        };
        let look_many = format!("SELECT {bounded} FROM {table} AS r WHERE r.`key` IN (");
        let pending = format!(") AND r.`state` = 'pending' AND {there}");
        Self {
            look: texts.one(&format!("SELECT {all} FROM {table} AS r WHERE r.`key` = {{key}}"), KEY),
            // Both servers know this old form of `FOR SHARE`.
            look_held: texts
                .one(&format!("SELECT {all} FROM {table} AS r WHERE r.`key` = {{key}} LOCK IN SHARE MODE"), KEY),
            // MariaDB runs the first comment and ignores the second one, and MySQL does the opposite.
            look_free: texts.one(
                &format!(
                    "SELECT {all} FROM {table} AS r WHERE r.`key` = {{key}} /*M! LOCK IN SHARE MODE NOWAIT */ \
                     /*!80000 FOR SHARE NOWAIT */"
                ),
                KEY,
            ),
            look_many: texts.many(look_many.clone(), "{key}", KEY, ")".to_owned(), Filler::NoKey),
            reserve: texts.one(&format!("{insert}{values}"), RESERVE),
            reserve_many: texts.many(insert.clone(), &values, RESERVE, keeps.to_owned(), Filler::LastRow),
            reserve_returning: texts.one(&format!("{insert}{values}{returning}"), RESERVE),
            reserve_many_returning: texts.many(insert, &values, RESERVE, returning_many, Filler::LastRow),
            replace,
            end,
            end_many,
            renew,
            renew_many,
            begin,
            begin_many,
            append,
            append_many,
            held_many,
            pending_many: texts.many(look_many, "{key}", KEY, pending, Filler::NoKey),
            decide,
            forget: texts.one(&forget, SEEN),
            forget_damaged: texts.one(&forget_damaged, STORED_COLUMNS),
            due: texts.one(&due, PURGE),
            delete_many: texts.joining("DELETE r FROM ", KEY, &delete_many, Locks::Free),
            relist_many: texts.joining("UPDATE ", KEY, &relist_many, Locks::Free),
            list: texts.one(&list("PRIMARY", ""), LIST),
            list_undecided: texts.one(&list("`undecided`", "r.`on_crash_fail` = 1 AND "), LIST),
            ping: texts.one(&format!("SELECT {unread} FROM {table} AS r WHERE r.`key` = ''"), KEY),
        }
    }
}

/// The first [`STORED`] columns of [`COLUMNS`], with the kinds of their values.
const STORED_COLUMNS: Shape = &[
    ("format", I),
    ("state", B),
    ("owner", B),
    ("attempt", I),
    ("attempts_used", I),
    ("fingerprint", B),
    ("on_crash_fail", I),
    ("lease_ms", I),
    ("ttl_ms", I),
    ("codec", B),
    ("result", B),
    ("result_bytes", I),
    ("lapses_at", I),
    ("expires_at", I),
    ("listed_at", I),
    ("began_at", I),
    ("traceparent", B),
    ("decided_by", B),
    ("decided_reason", B),
    ("begun", I),
    ("holder", B),
    ("first_seen_at", I),
    ("key", B),
];

/// Returns bytes as hexadecimal digits, for a parameter of the kind [`Kind::Hex`].
fn hex(bytes: &[u8]) -> Param {
    Param::Bytes(digits(bytes).collect())
}

/// Returns the hexadecimal digits of bytes.
fn digits(bytes: &[u8]) -> impl Iterator<Item = u8> {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |half: u8| DIGITS[usize::from(half)];
    bytes.iter().flat_map(move |byte| [digit(byte >> 4), digit(byte & 15)])
}

/// Returns the parameters of a reservation.
pub(super) fn reserve(request: &ReserveRequest) -> Vec<Param> {
    let first = Record::first(request);
    let parts = Parts::of(&first);
    vec![
        request.key.as_str().into(),
        hex(parts.owner),
        parts.fingerprint.map_or(Param::Null, hex),
        parts.on_crash_fail.into(),
        millis(request.lease).into(),
        millis(request.ttl).into(),
        parts.holder.into(),
        parts.traceparent.into(),
    ]
}

/// Returns the parameters of the replacement of the record `met` by the record `with`.
pub(super) fn replace(request: &ReserveRequest, met: &FoundRow, with: &Record) -> Vec<Param> {
    let (parts, seen) = (Parts::of(with), Parts::of(&met.record));
    vec![
        request.key.as_str().into(),
        hex(parts.owner),
        parts.fingerprint.map_or(Param::Null, hex),
        parts.on_crash_fail.into(),
        millis(request.lease).into(),
        millis(request.ttl).into(),
        parts.attempt.into(),
        parts.attempts_used.into(),
        parts.holder.into(),
        parts.traceparent.into(),
        parts.decided_by.into(),
        parts.decided_reason.into(),
        parts.begun.into(),
        met.is_expired().into(),
        hex(seen.owner),
        seen.attempt.into(),
        seen.state.into(),
        seen.begun.into(),
        stored_length(&met.record).into(),
    ]
}

/// Returns the parameters that name the attempt of `lease`.
pub(super) fn attempt(lease: &Lease) -> Vec<Param> {
    vec![lease.key.as_str().into(), hex(lease.owner.as_bytes()), i64::from(lease.attempt).into()]
}

/// Returns the parameters of an append.
pub(super) fn append(lease: &Lease, journal: &Journal) -> Vec<Param> {
    let mut params = attempt(lease);
    params.push(journal.bytes()[..].into());
    params.push(i64::try_from(journal.bytes().len()).unwrap_or(i64::MAX).into());
    params
}

/// Returns the parameters of the end of the attempt that `record` names.
pub(super) fn end(key: &str, record: &Record, refund: i64, ttl: Duration) -> Vec<Param> {
    let parts = Parts::of(record);
    vec![
        key.into(),
        hex(parts.owner),
        parts.state.into(),
        refund.into(),
        parts.codec.into(),
        parts.result.as_deref().into(),
        parts.result_bytes.into(),
        millis(ttl).into(),
        number_of(record).into(),
    ]
}

/// The write that applies a decision to a row.
pub(super) struct DecisionWrite<'s> {
    pub(super) statement: &'s Statement,
    pub(super) params: Vec<Param>,
    pub(super) effect: Effect,
}

impl Statements {
    /// Returns the write that applies `decision` to `row`, the row of its key. The error is the answer to a decision
    /// that writes nothing.
    pub(super) fn write_of(&self, decision: &Decision, row: Option<&Row>) -> Result<DecisionWrite<'_>, DecisionAnswer> {
        let row = row.ok_or(DecisionAnswer::NoRecord)?;
        let (statement, params, effect) = match found(row, ReadExtent::Whole) {
            // An unreadable row can only be forgotten.
            Err(_) => {
                let examined = examine(row).ok_or(DecisionAnswer::NoRecord)?;
                if let Ruling::Answer(refused) = examined.inspection.decide(decision) {
                    return Err(refused);
                }
                (&self.forget_damaged, examined.stored, Effect::Writes)
            }
            Ok(found) if found.is_expired() => return Err(DecisionAnswer::NoRecord),
            Ok(found) => match found.record.decide(decision, found.lapses_in()) {
                Ruling::Answer(refused) => return Err(refused),
                Ruling::Replace(with) => {
                    let effect = Effect::Records(with.state.result().map_or(0, StoredResult::stored_bytes));
                    (&self.decide, decide(decision, &found.record, &with), effect)
                }
                Ruling::Remove => (&self.forget, seen(decision, &found.record), Effect::Writes),
            },
        };
        Ok(DecisionWrite { statement, params, effect })
    }
}

/// Returns the parameters that name the record that `decision` found.
fn seen(decision: &Decision, found: &Record) -> Vec<Param> {
    let seen = Parts::of(found);
    vec![
        decision.key.as_str().into(),
        hex(seen.owner),
        seen.attempt.into(),
        seen.state.into(),
        seen.attempts_used.into(),
        seen.begun.into(),
        decision.ends_live_lease().into(),
    ]
}

/// Returns the parameters of a decision that replaces the record `found` by the record `with`.
fn decide(decision: &Decision, found: &Record, with: &Record) -> Vec<Param> {
    let parts = Parts::of(with);
    // The statement itself keeps the journal of an unfinished record, so only a changed journal is sent.
    let changes_journal = matches!(decision.action, Action::ReopenWith(_));
    let result = parts.result.as_deref().filter(|_| with.is_finished() || changes_journal);
    let mut params = seen(decision, found);
    params.extend([
        stored_length(found).into(),
        changes_journal.into(),
        hex(parts.owner),
        parts.state.into(),
        parts.attempts_used.into(),
        parts.codec.into(),
        result.into(),
        parts.result_bytes.into(),
        parts.decided_by.into(),
        parts.decided_reason.into(),
    ]);
    params
}

/// Returns the parameters of a list, and the number of rows that it reads at most.
pub(super) fn list(filter: &Filter) -> (Vec<Param>, usize) {
    let prefix = filter.prefix();
    // First string that sorts after every key with this prefix: the prefix ends with `/`, and `0` follows `/`.
    let end = format!("{}0", &prefix[..prefix.len() - 1]);
    let after = filter.after.as_ref().map_or("", Cursor::as_str).max(&prefix);
    let looked_at = if filter.is_selective() { LOOKED_AT } else { filter.most() };
    let limit = i64::try_from(looked_at).unwrap_or(i64::MAX);
    (vec![after.into(), end.as_str().into(), limit.into()], looked_at)
}

/// Reads the rows of a list.
pub(super) fn page(rows: &[Row], filter: &Filter, looked_at: usize) -> Page {
    let mut page = Page::default();
    let mut last = None;
    for (at, row) in rows.iter().enumerate() {
        if page.records.len() == filter.most() {
            page.next = last.map(Cursor::new);
            return page;
        }
        let Some(key) = row.key() else { continue };
        let key = String::from_utf8_lossy(key);
        let size = row.int(LENGTH_AT).ok().flatten().and_then(|size| u64::try_from(size).ok());
        let entry = match found(row, ReadExtent::WithoutResult(size)) {
            Ok(found) if found.is_expired() => None,
            Ok(found) => Some(found.inspection()),
            Err(why) => Some(Inspection::unexamined(&why)),
        };
        page.add::<FormatError>(filter, &key, Ok(entry));
        last = Some(key.into_owned());
        if at + 1 == looked_at {
            page.next = last.clone().map(Cursor::new);
        }
    }
    page
}
