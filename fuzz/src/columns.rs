//! Records in columns, as SQLite, PostgreSQL, MySQL and DynamoDB store them.
//!
//! An input is a record and values of any type that overwrite some of its columns. This module implements the layout of
//! the columns again, so that a mistake in the library is not repeated here.

use std::collections::HashMap;

use aws_sdk_dynamodb::primitives::Blob;
use aws_sdk_dynamodb::types::AttributeValue;
use idem_runtime::__stored::{Cells, meet_row, read_item, read_mysql_row, read_row};
use idem_runtime::record::format::FormatError;
use idem_runtime::record::{Admission, Record, State, StoredResult};
use idem_runtime::store::{Inspection, Reservation, ReserveRequest};
use idem_runtime::{OnCrash, StoreError, StoreErrorKind};
use mysql_async::Value as MySqlValue;
use rusqlite::Connection;
use rusqlite::types::Value;
use tokio_postgres::types::{FromSql, Type};

use super::input::Input;
use super::record::request;

const NAMES: [&str; 21] = [
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
    "holder",
    "traceparent",
    "decided_by",
    "decided_reason",
    "first_seen_at",
    "began_at",
    "begun",
];
const FORMAT: usize = 0;
const STATE: usize = 1;
const OWNER: usize = 2;
const LAPSES_AT: usize = 12;
const EXPIRES_AT: usize = 13;

/// Types of the columns in PostgreSQL.
const TYPES: [Type; 21] = [
    Type::INT2,
    Type::TEXT,
    Type::BYTEA,
    Type::INT8,
    Type::INT8,
    Type::BYTEA,
    Type::BOOL,
    Type::INT8,
    Type::INT8,
    Type::TEXT,
    Type::BYTEA,
    Type::INT8,
    Type::TIMESTAMPTZ,
    Type::TIMESTAMPTZ,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TEXT,
    Type::TIMESTAMPTZ,
    Type::TIMESTAMPTZ,
    Type::BOOL,
];

/// Content of one column.
#[derive(Clone, PartialEq, Debug)]
enum Cell {
    Null,
    Bool(bool),
    Int(i64),
    Real(f64),
    Text(String),
    Blob(Vec<u8>),
}

impl Cell {
    fn any(input: &mut Input<'_>) -> Self {
        match input.below(7) {
            0 => Self::Null,
            1 => Self::Bool(input.flag()),
            2 | 3 => Self::Int(input.integer()),
            4 => Self::Real(f64::from_bits(u64::from_be_bytes(input.array()))),
            5 => Self::Text(input.text()),
            _ => Self::Blob(input.bytes().to_vec()),
        }
    }

    /// Returns whether the cell has the type that the library writes in column `at`.
    fn fits(&self, at: usize) -> bool {
        match (self, &TYPES[at]) {
            (Self::Null, _) => {
                matches!(NAMES[at], "fingerprint" | "lease_ms" | "ttl_ms" | "codec" | "result" | "result_bytes")
                    || (EXPIRES_AT + 1..EXPIRES_AT + 5).contains(&at)
            }
            (Self::Bool(_), ty) => *ty == Type::BOOL,
            (Self::Int(n), ty) if *ty == Type::INT2 => i16::try_from(*n).is_ok(),
            (Self::Int(_), ty) => *ty == Type::INT8 || *ty == Type::TIMESTAMPTZ,
            (Self::Real(_), _) => false,
            (Self::Text(_), ty) => *ty == Type::TEXT,
            (Self::Blob(_), ty) => *ty == Type::BYTEA,
        }
    }
}

type Columns = [Cell; 21];

/// Returns the columns of `record`.
fn columns(record: &Record, lapses_at: i64, expires_at: i64) -> Columns {
    let millis =
        |duration: std::time::Duration| Cell::Int(i64::try_from(duration.as_millis()).expect("as it was made"));
    let (codec, result, result_bytes) = match record.state.result() {
        Some(result) => payload_columns(result),
        // The column of the result holds the journal of an unfinished record.
        None => {
            let journal = record.journal.as_ref().map_or(Cell::Null, |journal| Cell::Blob(journal.bytes().to_vec()));
            (Cell::Null, journal, Cell::Null)
        }
    };
    let told = |text: Option<String>| text.map_or(Cell::Null, Cell::Text);
    let (lease, ttl, fails, begun) = match record.state {
        State::Pending { lease, ttl, on_crash, begun } => {
            (millis(lease), millis(ttl), on_crash == OnCrash::Fail, begun)
        }
        _ => (Cell::Null, Cell::Null, false, false),
    };
    [
        Cell::Int(1),
        Cell::Text(record.state.name().to_owned()),
        Cell::Blob(record.owner.as_bytes().to_vec()),
        Cell::Int(record.attempt.into()),
        Cell::Int(record.attempts_used.into()),
        record.fingerprint.map_or(Cell::Null, |fingerprint| Cell::Blob(fingerprint.as_bytes().to_vec())),
        Cell::Bool(fails),
        lease,
        ttl,
        codec,
        result,
        result_bytes,
        Cell::Int(lapses_at),
        Cell::Int(expires_at),
        told(record.provenance.holder().map(|holder| holder.to_string())),
        told(record.provenance.traceparent().map(|parent| parent.to_string())),
        told(record.provenance.decided_by().map(str::to_owned)),
        told(record.provenance.decided_reason().map(str::to_owned)),
        Cell::Int(1),
        Cell::Int(2),
        Cell::Bool(begun),
    ]
}

fn payload_columns(payload: &StoredResult) -> (Cell, Cell, Cell) {
    match payload {
        StoredResult::Encoded { codec, bytes } => {
            (Cell::Text(codec.as_str().to_owned()), Cell::Blob(bytes.to_vec()), Cell::Null)
        }
        StoredResult::TooLarge { size } => (Cell::Null, Cell::Null, Cell::Int(size.cast_signed())),
        _ => (Cell::Null, Cell::Null, Cell::Null),
    }
}

/// Asserts that every store reads a record as it was written, and reports columns that it can't read as `Corrupt`. From
/// altered columns of the right types, all stores must read the same record, or all must report an error.
pub fn columns_as_stored(data: &[u8]) {
    let mut input = Input(data);
    let written = input.record();
    let (now, lapses_at, expires_at) = (input.integer(), input.integer(), input.integer());
    let mut row = columns(&written, lapses_at, expires_at);
    let altered = input.below(4);
    for _ in 0..altered {
        let at = usize::from(input.below(21));
        row[at] = Cell::any(&mut input);
    }
    let mangled = input.flag();

    let sqlite = sqlite(&row, &request(&mut input), now);
    let postgres = postgres(&row, mangled);
    let [mysql, mysql_of_texts] = [false, true].map(|as_texts| mysql(&row, as_texts));
    let dynamo = dynamo(&row);

    let of_the_right_types = row.iter().enumerate().all(|(at, cell)| cell.fits(at));
    if of_the_right_types {
        assert_eq!(postgres, dynamo, "{row:?}");
        assert_eq!(mysql, dynamo, "{row:?}");
        assert_eq!(mysql_of_texts, dynamo, "{row:?}");
        if let Ok(sqlite) = sqlite {
            assert_eq!(sqlite, dynamo, "{row:?}");
        }
    }
    if altered == 0 {
        assert_eq!(dynamo.as_ref(), Some(&written));
    }
    // A record that is read from altered columns must be unchanged after it is written into columns and read again.
    for record in [postgres, mysql, mysql_of_texts, dynamo].into_iter().flatten() {
        let row = columns(&record, lapses_at, expires_at);
        assert_eq!(self::postgres(&row, false).as_ref(), Some(&record));
        assert_eq!(self::mysql(&row, false).as_ref(), Some(&record));
        assert_eq!(self::dynamo(&row).as_ref(), Some(&record));
    }
}

/// Asserts that an unreadable value is reported as `Corrupt`.
fn corrupt<T>(answer: Result<T, StoreError>) -> Option<T> {
    answer.map_err(|error| assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{error}")).ok()
}

// ---- SQLite
// ----------------------------------------------------------------------------------------------------------

thread_local! {
    // The columns have no types, so that each value stays as it was written.
    static TABLE: Connection = {
        let connection = Connection::open_in_memory().expect("opens");
        let columns = format!("CREATE TABLE idem_records (key PRIMARY KEY, {}, listed_at)", NAMES.join(", "));
        connection.execute_batch(&columns).expect("makes a table");
        connection
    };
}

/// Error: the retention of the record has ended.
struct Ended;

/// Reads a row as SQLite stores it.
fn sqlite(row: &Columns, request: &ReserveRequest, now: i64) -> Result<Option<Record>, Ended> {
    // Only pending records use `lapses_at`. In other states the reader ignores a number in that column.
    let lapses = row[STATE] == Cell::Text("pending".to_owned()) || !matches!(row[LAPSES_AT], Cell::Int(_));
    let mut values = vec![Value::from(request.key.as_str().to_owned())];
    values.extend(row.iter().enumerate().map(|(at, cell)| match cell {
        _ if at == LAPSES_AT && !lapses => Value::Null,
        Cell::Null => Value::Null,
        Cell::Bool(flag) => Value::from(i64::from(*flag)),
        Cell::Int(n) => Value::from(*n),
        Cell::Real(n) => Value::from(*n),
        Cell::Text(text) => Value::from(text.clone()),
        Cell::Blob(bytes) => Value::from(bytes.clone()),
    }));
    // `inspect` and `reserve` read one row, so that the two answers can be compared.
    let (seen, reserved) = TABLE.with(|connection| {
        let marks = vec!["?"; values.len()].join(", ");
        let insert = format!("INSERT OR REPLACE INTO idem_records VALUES ({marks}, NULL)");
        connection.execute(&insert, rusqlite::params_from_iter(values)).expect("inserts");
        meet_row(connection, request, now)
    });
    let seen: Option<Option<Inspection>> = corrupt(seen);
    match seen {
        // No reservation succeeds on an unreadable record.
        None => {
            reserved.map_err(|error| assert_eq!(error.kind(), StoreErrorKind::Corrupt)).expect_err("reserved");
            Ok(None)
        }
        Some(None) => {
            let integer = |at: usize| match row[at] {
                Cell::Int(n) => Some(n),
                Cell::Bool(flag) => Some(flag.into()),
                _ => None,
            };
            // The reader must not report an ended retention for a row of another version.
            assert_eq!(integer(FORMAT), Some(1), "another version's times are judged");
            assert!(integer(EXPIRES_AT).is_some_and(|at| at <= now), "forgotten too early");
            assert!(matches!(reserved, Ok(Reservation::Granted { takeover: false, .. })), "{reserved:?}");
            Err(Ended)
        }
        Some(Some(Inspection { record, lapses_in, .. })) => {
            // The reservation in SQL must decide as `Record::admit` does.
            match (record.admit(request, lapses_in.unwrap_or_default()), reserved) {
                (Admission::Answer(expected), Ok(answer)) => assert_eq!(answer.aged(None), expected),
                (Admission::Replace { with, takeover }, Ok(answer)) => {
                    assert_eq!(answer, with.grant(request, takeover));
                }
                (expected, Err(error)) => panic!("{error} instead of {expected:?}"),
            }
            Ok(Some(record))
        }
    }
}

// ---- PostgreSQL
// ------------------------------------------------------------------------------------------------------

/// A row in the driver's form: bytes, and the types named by the server.
struct Row(Vec<(Type, Option<Vec<u8>>)>);

impl Cells for Row {
    fn cell<'a, T: FromSql<'a>>(&'a self, at: usize) -> Result<T, FormatError> {
        let (ty, bytes) = self.0.get(at).ok_or(FormatError::Damaged)?;
        if !T::accepts(ty) {
            return Err(FormatError::Damaged);
        }
        T::from_sql_nullable(ty, bytes.as_deref()).map_err(|_| FormatError::Damaged)
    }
}

/// Reads a row as PostgreSQL stores it. With `mangled`, some bytes don't match their type.
fn postgres(row: &Columns, mangled: bool) -> Option<Record> {
    let mut cells: Vec<_> = row
        .iter()
        .enumerate()
        .map(|(at, cell)| match cell {
            Cell::Null => (TYPES[at].clone(), None),
            Cell::Bool(flag) => (Type::BOOL, Some(vec![u8::from(*flag)])),
            Cell::Int(n) => match (&TYPES[at], i16::try_from(*n)) {
                (&Type::INT2, Ok(n)) => (Type::INT2, Some(n.to_be_bytes().to_vec())),
                (&Type::TIMESTAMPTZ, _) => (Type::TIMESTAMPTZ, Some(n.to_be_bytes().to_vec())),
                _ => (Type::INT8, Some(n.to_be_bytes().to_vec())),
            },
            Cell::Real(n) => (Type::FLOAT8, Some(n.to_be_bytes().to_vec())),
            Cell::Text(text) => (Type::TEXT, Some(text.clone().into_bytes())),
            Cell::Blob(bytes) if mangled => (TYPES[at].clone(), Some(bytes.clone())),
            Cell::Blob(bytes) => (Type::BYTEA, Some(bytes.clone())),
        })
        .collect();
    cells.insert(EXPIRES_AT + 1, (Type::TIMESTAMPTZ, Some(0_i64.to_be_bytes().to_vec())));
    // The statement returns the columns of a replay first: `began_at` has the place of `holder`; `begun`, `holder` and
    // `first_seen_at` come last.
    cells.swap(EXPIRES_AT + 2, EXPIRES_AT + 7);
    cells.swap(EXPIRES_AT + 6, EXPIRES_AT + 7);
    let begun = cells.pop().expect("the last one");
    cells.insert(EXPIRES_AT + 6, begun);
    match corrupt(read_row(&Row(cells)))? {
        Some(Inspection { record, .. }) => Some(record),
        // A reservation that has just inserted its row returns no values in these columns.
        None => {
            assert!([FORMAT, STATE, OWNER].iter().all(|at| row[*at] == Cell::Null), "no record: {row:?}");
            None
        }
    }
}

// ---- MySQL
// -----------------------------------------------------------------------------------------------------------

/// Reads a row as MySQL stores it. With `as_texts`, numbers are texts, as in the answer to a statement that is not
/// prepared.
fn mysql(row: &Columns, as_texts: bool) -> Option<Record> {
    let value = |cell: &Cell| match cell {
        Cell::Null => MySqlValue::NULL,
        Cell::Bool(flag) if as_texts => MySqlValue::Bytes(u8::from(*flag).to_string().into_bytes()),
        Cell::Bool(flag) => MySqlValue::Int((*flag).into()),
        Cell::Int(n) if as_texts => MySqlValue::Bytes(n.to_string().into_bytes()),
        Cell::Int(n) => MySqlValue::Int(*n),
        Cell::Real(n) => MySqlValue::Double(*n),
        Cell::Text(text) => MySqlValue::Bytes(text.clone().into_bytes()),
        Cell::Blob(bytes) => MySqlValue::Bytes(bytes.clone()),
    };
    let column = |name: &str| value(&row[NAMES.iter().position(|it| *it == name).expect("a column")]);
    let mut values: Vec<_> = row[..=EXPIRES_AT].iter().map(value).collect();
    // `listed_at`.
    values.push(MySqlValue::Int(0));
    values.extend(
        ["began_at", "traceparent", "decided_by", "decided_reason", "begun", "holder", "first_seen_at"].map(column),
    );
    // The key, the length of the result, and the server's time.
    values.extend([MySqlValue::Bytes(b"1/fuzz/key".to_vec()), MySqlValue::NULL, MySqlValue::Int(0)]);
    corrupt(read_mysql_row(values)).map(|found| found.record)
}

// ---- DynamoDB
// --------------------------------------------------------------------------------------------------------

/// Reads an item with these attributes as DynamoDB stores it.
fn dynamo(row: &Columns) -> Option<Record> {
    let attribute = |cell: &Cell| {
        Some(match cell {
            Cell::Null => return None,
            Cell::Bool(flag) => AttributeValue::Bool(*flag),
            Cell::Int(n) => AttributeValue::N(n.to_string()),
            Cell::Real(n) => AttributeValue::N(n.to_string()),
            Cell::Text(text) => AttributeValue::S(text.clone()),
            Cell::Blob(bytes) => AttributeValue::B(Blob::new(bytes.clone())),
        })
    };
    let named = NAMES.iter().zip(row).filter_map(|(name, cell)| Some(((*name).to_owned(), attribute(cell)?)));
    let item: HashMap<_, _> = named.collect();
    corrupt(read_item(item)).map(|(record, ..)| record)
}
