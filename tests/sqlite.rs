//! `SqliteStore` on real files: its table, its errors, its handles and processes, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real files")]
#![allow(clippy::format_collect, reason = "a handful of bytes")]
// The futures of these tests are deep: they contain a store, its queue and its threads.
#![recursion_limit = "256"]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::StoreExt;
use idem_runtime::clock::{Clock, Instant, ManualClock, Sleep, Task};
use idem_runtime::key::Fingerprint;
use idem_runtime::record::{Record, State, StoredResult, Traceparent};
use idem_runtime::sqlite::{SqliteOptions, Synchronous};
use idem_runtime::store::{
    Decision, DecisionAnswer, Filter, Finish, Holder, Lease, OwnerToken, Release, Reservation, Standing, Verdict,
    renew_all,
};
use idem_runtime::{
    Error, InProgress, Key, OnCrash, Operation, SqliteStore, Store, StoreError, StoreErrorKind, current, observe,
};
use idem_tests::Reopen as _;
use idem_tests::calls::{
    Confirming, LEASE, POLICY, TRACEPARENT, TTL, call, done, is_of_a_later_format, kept, key, lease_of, one_step,
    publish, request, reserved, stored,
};
use idem_tests::natural;
use idem_tests::race::{self, Race};
use idem_tests::server::until;
use idem_tests::sqlite::{Folder, raw};
use rusqlite::Connection;
use rusqlite::config::DbConfig;
use rusqlite::types::Value;

async fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(path).await.unwrap()
}

async fn refusal(options: SqliteOptions, path: impl AsRef<Path>) -> StoreError {
    options.open(path).await.expect_err("refused")
}

fn kind<T: std::fmt::Debug>(answer: &Result<T, StoreError>) -> StoreErrorKind {
    answer.as_ref().expect_err("fails").kind()
}

// Columns of stored records.

/// 2100-01-01, in milliseconds since 1970. Replaces every time in a dump, so that rows can be compared.
const LATER: i64 = 4_102_444_800_000;

/// End of an attempt; `None` if the attempt runs.
type End = Option<Result<Finish, Release>>;

/// Writes records in every state. Returns them with their keys.
async fn write_all(store: &SqliteStore) -> Vec<(Key, Record)> {
    let fingerprint = Some(Fingerprint::from_bytes([0x5a; 32]));
    let result = stored(&br#"{"a":1}"#[..]);
    // Records in every state, with and without the optional fields.
    let ends: [(&str, Option<Fingerprint>, End); 14] = [
        ("pending", None, None),
        ("pending-fingerprint", fingerprint, None),
        ("released", None, Some(Err(Release::Returned))),
        ("not-started", None, Some(Err(Release::NotStarted))),
        ("interrupted", fingerprint, Some(Err(Release::Interrupted))),
        ("completed", None, Some(Ok(Finish::Completed(result.clone())))),
        ("completed-fingerprint", fingerprint, Some(Ok(Finish::Completed(result.clone())))),
        ("failed", None, Some(Ok(Finish::Failed(result)))),
        ("too-large", None, Some(Ok(Finish::Completed(StoredResult::TooLarge { size: 300_000 })))),
        ("unencodable", None, Some(Ok(Finish::Completed(StoredResult::Unencodable)))),
        ("pending-journal", fingerprint, None),
        ("released-journal", None, Some(Err(Release::Returned))),
        ("interrupted-journal", fingerprint, Some(Err(Release::Interrupted))),
        ("completed-kept", None, Some(Ok(Finish::Completed(kept())))),
    ];
    let mut records = Vec::new();
    for (name, fingerprint, end) in ends {
        let owner = OwnerToken::from_bytes(*b"0123456789abcdef");
        let on_crash = if name.starts_with("pending-") { OnCrash::Fail } else { OnCrash::Retry };
        let lease = Duration::from_secs(30);
        let request = request(store, name).owner(owner).fingerprint(fingerprint).on_crash(on_crash).lease(lease);
        let request = match fingerprint {
            Some(_) => request.holder(Holder::new("host/7/name")).traceparent(TRACEPARENT.parse::<Traceparent>().ok()),
            None => request,
        };
        let lease = lease_of(store.reserve(&request).await);
        let journal = name.ends_with("-journal").then(one_step);
        if let Some(journal) = &journal {
            assert_eq!(store.append(&lease, journal).await.unwrap(), Verdict::Applied);
        }
        match &end {
            None => {}
            Some(Ok(finish)) => assert_eq!(store.finish(&lease, finish).await.unwrap(), Verdict::Applied),
            Some(Err(release)) => assert_eq!(store.release(&lease, *release).await.unwrap(), Verdict::Applied),
        }
        // The expected record is computed without the store.
        let mut record = Record::first(&request);
        record.journal = journal;
        if name == "interrupted" {
            let found = store.inspect(&request.key).await.unwrap().expect("a record");
            let noted = Decision::break_lease(&request.key, &found).by("alice").reason("INC-7");
            assert_eq!(store.decide(&noted).await.unwrap(), DecisionAnswer::Applied);
            record.owner = idem_tests::decided(record.owner, 1);
            record.provenance = record.provenance.with_decision("alice", "INC-7");
        }
        match end {
            None => {}
            Some(Ok(finish)) => record.state = finish.state(),
            Some(Err(release)) => {
                record.state = release.state();
                record.attempts_used -= u32::from(release == Release::NotStarted);
            }
        }
        records.push((request.key, record));
    }
    records
}

/// The table as SQL text, in which [`LATER`] replaces all times.
fn dump(connection: &Connection) -> String {
    let mut text = String::new();
    let mut schema =
        connection.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type DESC, name").unwrap();
    for sql in schema.query_map([], |row| row.get::<_, String>(0)).unwrap() {
        writeln!(text, "{};", sql.unwrap()).unwrap();
    }
    let times = format!(
        "UPDATE idem_records SET expires_at = {LATER}, listed_at = {LATER}, first_seen_at = 1, began_at = 2, \
         lapses_at = iif(lapses_at IS NULL, NULL, {LATER})"
    );
    connection.execute_batch(&times).unwrap();
    let mut rows = connection.prepare("SELECT * FROM idem_records ORDER BY key").unwrap();
    let columns = rows.column_count();
    let mut rows = rows.query([]).unwrap();
    while let Some(row) = rows.next().unwrap() {
        let value = |at| match row.get_ref(at).unwrap() {
            rusqlite::types::ValueRef::Null => "NULL".to_owned(),
            rusqlite::types::ValueRef::Integer(number) => number.to_string(),
            rusqlite::types::ValueRef::Text(text) => format!("'{}'", str::from_utf8(text).unwrap()),
            rusqlite::types::ValueRef::Blob(bytes) => {
                format!("x'{}'", bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
            }
            other @ rusqlite::types::ValueRef::Real(_) => panic!("{other:?}"),
        };
        let values: Vec<_> = (0..columns).map(value).collect();
        writeln!(text, "INSERT INTO idem_records VALUES ({});", values.join(", ")).unwrap();
    }
    text
}

#[tokio::test]
async fn the_stored_form_is_pinned() {
    let golden = include_str!("golden/sqlite-v1.txt");
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let records = write_all(&store).await;
    drop(store);
    let written = dump(&raw(&folder.file()));
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/sqlite-v1.txt"), &written).unwrap();
    }
    assert_eq!(written, golden, "a released form never changes: give a new form a new version");

    // The store reads the pinned rows.
    let folder = Folder::new();
    raw(&folder.file()).execute_batch(golden).unwrap();
    let store = open(&folder.file()).await;
    for (key, record) in records {
        let found = store.inspect(&key).await.unwrap().unwrap();
        assert_eq!(found.record, record, "{key}");
        assert_eq!(found.lapses_in.is_some(), matches!(record.state, State::Pending { .. }), "{key}");
    }
}

#[tokio::test]
async fn the_times_of_a_row_are_milliseconds_of_the_wall_clock() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let now = || i64::try_from(std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap();
    let millis = |duration: Duration| i64::try_from(duration.as_millis()).unwrap();
    let times = || {
        let sql = "SELECT lapses_at, expires_at, listed_at FROM idem_records";
        raw(&folder.file())
            .query_row(sql, [], |row| Ok((row.get::<_, Option<i64>>(0)?, row.get::<_, i64>(1)?, row.get::<_, i64>(2)?)))
            .unwrap()
    };
    let before = now();
    let lease = reserved(&store, "k").await;
    let (lapses_at, expires_at, listed_at) = times();
    let at = listed_at - millis(TTL);
    assert!((before..=now()).contains(&at), "{before} {at}");
    assert_eq!((lapses_at, expires_at), (Some(at + millis(LEASE)), at + millis(LEASE) + millis(TTL)));
    let before = now();
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    let (lapses_at, expires_at, still_listed_at) = times();
    assert_eq!((lapses_at, still_listed_at), (None, listed_at), "a completion leaves the index alone");
    assert!((before..=now()).contains(&(expires_at - millis(TTL))), "the ttl counts from completion");
}

#[tokio::test]
async fn expired_records_are_cleaned_up() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let raw = raw(&folder.file());
    let rows = || raw.query_row("SELECT count(*) FROM idem_records", [], |row| row.get::<_, u32>(0)).unwrap();
    for n in 0..100 {
        let lease = reserved(&store, &format!("finished{n}")).await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    }
    let alive = reserved(&store, "alive").await;
    // The update makes all rows due for clean-up, and all but one of them expired, as if time had passed.
    raw.execute("UPDATE idem_records SET listed_at = 1, expires_at = iif(state = 'pending', expires_at, 2)", [])
        .unwrap();
    assert_eq!(store.inspect(&key("finished0")).await.unwrap(), None, "expired, cleaned up or not");
    // Every eighth reservation deletes sixteen expired rows, that is two for each reservation, so that rows can't pile
    // up. 101 reservations came before.
    for n in 0..11 {
        reserved(&store, &format!("new{n}")).await;
    }
    assert!((80..=81).contains(&rows()), "{} rows", rows());
    // `purge` deletes the remaining rows, at most as many in one call as its argument says.
    assert!(store.purge(5).await.unwrap() <= 5);
    while store.purge(50).await.unwrap() > 0 {}
    assert_eq!(rows(), 12, "eleven new rows, and the row of the unexpired record");
    assert_eq!(store.finish(&alive, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn the_table_of_records_shares_a_file_with_the_applications_tables() {
    let folder = Folder::new();
    let application = raw(&folder.file());
    application.execute_batch("PRAGMA user_version = 7; CREATE TABLE orders (id INTEGER PRIMARY KEY);").unwrap();
    let other = SqliteStore::options().table("other_2").synchronous(Synchronous::Normal);
    let (store, other) = (open(&folder.file()).await, other.open(folder.file()).await.unwrap());
    assert_eq!((reserved(&store, "k").await.attempt, reserved(&other, "k").await.attempt), (1, 1));
    application.execute_batch("INSERT INTO orders VALUES (1)").unwrap();
    let version: u32 = application.query_row("PRAGMA user_version", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 7);
}

// Errors.

#[tokio::test]
async fn paths_and_table_names_that_can_not_be_used_are_refused() {
    let folder = Folder::new();
    let options = SqliteStore::options;
    for path in [Path::new(""), Path::new(":memory:"), folder.path(), &folder.path().join("no/such/folder.db")] {
        let error = refusal(options(), path).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{}: {error}", path.display());
    }
    for table in ["", "two words", "quote\"", "sqlite_records", "Sqlite_records", "naïve"] {
        let error = refusal(options().table(table), folder.file()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{table}: {error}");
    }
    assert!(!folder.file().exists());
    // SQLite must read the path as a file name, and not as a URI.
    let store = SqliteStore::open(folder.path().join("file:x?mode=memory")).await.unwrap();
    reserved(&store, "k").await;
    assert!(folder.path().join("file:x?mode=memory").exists());
}

#[tokio::test]
async fn files_of_other_applications_are_refused_and_left_unchanged() {
    let folder = Folder::new();
    let text = "not a database, and longer than the header of one: ".repeat(10);
    fs::write(folder.file(), &text).unwrap();
    let error = refusal(SqliteStore::options(), folder.file()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("not a SQLite database"), "{error}");
    assert_eq!(fs::read_to_string(folder.file()).unwrap(), text);
}

#[tokio::test]
async fn tables_of_other_applications_and_later_releases_are_left_unchanged() {
    let folder = Folder::new();
    drop(open(&folder.file()).await);
    let raw = raw(&folder.file());
    raw.execute_batch("CREATE TABLE theirs (key TEXT, state TEXT); INSERT INTO theirs VALUES ('a', 'b');").unwrap();
    raw.execute_batch("ALTER TABLE idem_records ADD COLUMN region TEXT").unwrap();
    for (table, words) in [("theirs", "not of this library"), ("idem_records", "of a later release (region)")] {
        let error = refusal(SqliteStore::options().table(table), folder.file()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{table}: {error}");
        assert!(error.to_string().contains(words), "{table}: {error}");
    }
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let raw = raw(&folder.file());
    raw.execute_batch("UPDATE idem_records SET format = 2").unwrap();
    let before = dump(&raw);
    is_of_a_later_format(&store, "k").await;
    assert_eq!(dump(&raw), before);
}

/// The runbook has this statement for the tables of three stores.
#[tokio::test]
async fn a_statement_counts_the_unfinished_records_with_a_journal() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    write_all(&store).await;
    let raw = raw(&folder.file());
    let mut rows = raw.prepare(&idem_tests::statement_about_journals("idem_records")).unwrap();
    let row = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
    let rows: Vec<(String, i64, i64, i64)> = rows.query_map([], row).unwrap().map(Result::unwrap).collect();
    let bytes = i64::try_from(one_step().bytes().len()).unwrap();
    let expected = ["interrupted", "pending", "released"].map(|state| (state.to_owned(), 1, bytes, bytes));
    assert_eq!(rows, expected);
}

#[tokio::test]
async fn damaged_rows_and_rows_of_a_later_version_are_left_unchanged() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let raw = raw(&folder.file());
    // Rows of a later version and rows with one damaged column, each with a part of the expected error.
    let spoilt = [
        ("later", "format = 2", "format 2"),
        ("later-and-expired", "format = 2, expires_at = 1", "format 2"),
        ("no-format", "format = 'one'", "damaged"),
        ("state", "state = 'X'", "damaged"),
        ("state-blob", "state = x'50'", "damaged"),
        ("owner", "owner = x'00'", "damaged"),
        ("owner-text", "owner = '0123456789abcdef'", "damaged"),
        ("attempt", "attempt = 0", "damaged"),
        ("attempts_used", "attempts_used = 7", "damaged"),
        ("flag", "on_crash_fail = 2", "damaged"),
        ("expiry", "expires_at = 'never'", "damaged"),
        ("lapse", "lapses_at = NULL", "damaged"),
        ("fingerprint", "fingerprint = x'00'", "damaged"),
    ];
    for (name, how, words) in spoilt {
        let lease = reserved(&store, name).await;
        raw.execute(&format!("UPDATE idem_records SET {how} WHERE key = '1/test/{name}'"), []).unwrap();
        let row = || {
            let sql = "SELECT format || state || hex(owner) || attempt || attempts_used || expires_at FROM idem_records WHERE key = ?1";
            raw.query_row(sql, [format!("1/test/{name}")], |row| row.get::<_, String>(0)).unwrap()
        };
        let before = row();
        // No body runs, and no operation changes the row.
        for _ in 0..2 {
            let runs = AtomicU32::new(0);
            let (result, _) = call(&store, name, &runs).await;
            let Err(Error::Store { source, .. }) = result else { panic!("{name}: {result:?}") };
            assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{name}");
            assert!(source.to_string().contains(words), "{name}: {source}");
            assert_eq!(runs.into_inner(), 0, "{name}");
        }
        let stranger = {
            let mut lease = lease;
            lease.owner = store.context().new_owner();
            lease
        };
        for answer in [
            store.finish(&stranger, &done()).await,
            store.release(&stranger, Release::Returned).await,
            renew_all(&store, std::slice::from_ref(&stranger)).await.map(|answers| answers[0]),
        ] {
            assert!(!matches!(answer, Ok(Verdict::Applied)), "{name}: {answer:?}");
        }
        store.purge(1000).await.unwrap();
        assert_eq!(row(), before, "{name}");
        idem_tests::forget_damaged(&store, &stranger.key, words).await;
    }
}

#[tokio::test]
async fn results_too_large_for_sqlite_are_refused_before_the_write() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let lease = reserved(&store, "k").await;
    let result = Bytes::from(vec![0; 1_000_000_000]);
    let answer = store.finish(&lease, &Finish::Completed(stored(result.clone()))).await;
    assert_eq!(kind(&answer), StoreErrorKind::TooLarge, "{answer:?}");
    assert!(matches!(store.inspect(&lease.key).await.unwrap().unwrap().record.state, State::Pending { .. }));
    let without = Finish::Completed(StoredResult::TooLarge { size: 1_000_000_000 });
    assert_eq!(store.finish(&lease, &without).await.unwrap(), Verdict::Applied);
}

/// Output of another process that opens `path` with only the rights that the file modes give.
fn open_as_ordinary_process(path: &Path) -> String {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    // The superuser ignores file modes unless it drops that right.
    if Command::new("id").arg("-u").output().unwrap().stdout == b"0\n" {
        command.args([
            "--bounding-set",
            "-dac_override,-dac_read_search",
            "--inh-caps",
            "-dac_override,-dac_read_search",
        ]);
    }
    command.arg(env!("CARGO_BIN_EXE_recorder")).args([&format!("sqlite {}", path.display()), "1"]);
    let output = command.output().expect("setpriv runs");
    assert!(!output.status.success(), "the file was used");
    String::from_utf8(output.stderr).unwrap()
}

#[tokio::test]
async fn a_read_only_file_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    let folder = Folder::new();
    reserved(&open(&folder.file()).await, "k").await;
    let closed = || folder.path().join("records.db-wal").exists();
    while closed() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    mode(&folder.file(), 0o444);
    let said = open_as_ordinary_process(&folder.file());
    assert!(said.contains("Misconfigured") && said.contains("is read-only"), "{said}");
    mode(&folder.file(), 0o644);
    mode(folder.path(), 0o555);
    let said = open_as_ordinary_process(&folder.file());
    assert!(said.contains("Misconfigured") && said.contains("folder"), "{said}");
    let said = open_as_ordinary_process(&folder.path().join("new.db"));
    assert!(said.contains("Misconfigured") && said.contains("folder"), "{said}");
    mode(folder.path(), 0o755);
}

// Faults of the file and its locks.

#[tokio::test]
async fn writes_fail_while_another_process_holds_the_lock_and_replays_succeed() {
    let folder = Folder::new();
    let options = SqliteStore::options().busy_timeout(Duration::from_millis(50));
    let store = options.open(folder.file()).await.unwrap();
    let runs = AtomicU32::new(0);
    assert_eq!(call(&store, "done", &runs).await.0.unwrap(), 1);
    let pending = reserved(&store, "pending").await;
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let new = request(&store, "new");
    for answer in [
        store.reserve(&new).await.map(drop),
        store.finish(&pending, &done()).await.map(drop),
        renew_all(&store, std::slice::from_ref(&pending)).await.map(drop),
        store.release(&pending, Release::Returned).await.map(drop),
        store.reopen(&pending.key, 1).await.map(drop),
        store.purge(1).await.map(drop),
    ] {
        assert_eq!(kind(&answer), StoreErrorKind::Unavailable, "{answer:?}");
        assert!(answer.unwrap_err().to_string().contains("another process holds the lock"));
    }
    assert!(call(&store, "done", &runs).await.1.replayed());
    assert!(matches!(store.reserve(&request(&store, "pending")).await, Ok(Reservation::InProgress { attempt: 1, .. })));
    assert!(store.inspect(&pending.key).await.unwrap().is_some());
    holder.execute_batch("COMMIT").unwrap();
    assert_eq!(store.inspect(&new.key).await.unwrap(), None, "nothing was written");
    assert_eq!(store.finish(&pending, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn a_write_waits_for_a_lock_that_is_released_in_time() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let free = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        holder.execute_batch("COMMIT").unwrap();
    };
    let request = request(&store, "k");
    let (answer, ()) = tokio::join!(store.reserve(&request), free);
    assert_eq!(lease_of(answer).attempt, 1);
}

#[tokio::test]
async fn a_call_that_gets_no_lock_fails_and_says_whether_it_may_still_write() {
    let folder = Folder::new();
    let options = SqliteStore::options().response_timeout(Duration::from_millis(100)).queue_capacity(1);
    let store = options.busy_timeout(Duration::from_secs(600)).open(folder.file()).await.unwrap();
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (begun, waiting, refused) = (request(&store, "begun"), request(&store, "waiting"), request(&store, "refused"));
    let answer = store.reserve(&begun).await;
    assert_eq!(
        kind(&answer),
        StoreErrorKind::Unconfirmed,
        "a call that waits for the lock may still write: {answer:?}"
    );
    let (waited, answer) = tokio::join!(store.reserve(&waiting), store.reserve(&refused));
    assert_eq!(kind(&waited), StoreErrorKind::Unavailable, "a call that was never begun writes nothing: {waited:?}");
    assert!(answer.unwrap_err().to_string().contains("too many calls"));
    holder.execute_batch("COMMIT").unwrap();
    store.flush().await;
    assert_eq!(store.inspect(&waiting.key).await.unwrap(), None);
    assert_eq!(store.inspect(&refused.key).await.unwrap(), None);
    // The caller was gone when the lock became free, so the reservation was skipped.
    assert_eq!(store.inspect(&begun.key).await.unwrap(), None);
    assert_eq!(lease_of(store.reserve(&begun).await).attempt, 1);
}

#[tokio::test]
async fn a_full_store_refuses_every_write() {
    let folder = Folder::new();
    let store = SqliteStore::options().max_bytes(256 * 1024).open(folder.file()).await.unwrap();
    let runs = AtomicU32::new(0);
    assert_eq!(call(&store, "first", &runs).await.0.unwrap(), 1);
    let held = reserved(&store, "held").await;
    let (large, beside) = (reserved(&store, "large").await, reserved(&store, "beside").await);
    // A write that does not fit fails alone, and other writes of the same transaction succeed.
    let too_large = Finish::Completed(stored(vec![b'x'; 220 * 1024]));
    let (done, meanwhile) = (done(), request(&store, "meanwhile"));
    let answers =
        tokio::join!(store.finish(&large, &too_large), store.finish(&beside, &done), store.reserve(&meanwhile),);
    assert_eq!(kind(&answers.0), StoreErrorKind::Full, "{answers:?}");
    assert_eq!(answers.1.unwrap(), Verdict::Applied);
    lease_of(answers.2);
    assert!(matches!(store.inspect(&large.key).await.unwrap().unwrap().record.state, State::Pending { .. }));
    let mut count = 0;
    let error = loop {
        count += 1;
        match store.reserve(&request(&store, &format!("k{count}"))).await {
            Ok(_) => assert!(count < 10_000, "the store never fills"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
    assert_eq!(store.inspect(&key(&format!("k{count}"))).await.unwrap(), None);
    for n in 1..count {
        assert!(store.inspect(&key(&format!("k{n}"))).await.unwrap().is_some(), "{n} is forgotten early");
    }
    assert!(call(&store, "first", &runs).await.1.replayed());
    // A store handle without the size limit can write to the file.
    let roomy = open(&folder.file()).await;
    assert_eq!(roomy.finish(&held, &done).await.unwrap(), Verdict::Applied);
}

/// Store whose file is full, with the leases of attempts that have begun.
async fn filled(folder: &Folder) -> (SqliteStore, Vec<Lease>) {
    let store = SqliteStore::options().max_bytes(256 * 1024).open(folder.file()).await.unwrap();
    let mut leases = Vec::new();
    loop {
        match store.reserve(&request(&store, &format!("k{}", leases.len()))).await {
            Ok(reservation) => leases.push(lease_of(Ok(reservation))),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Full, "{error}");
                return (store, leases);
            }
        }
    }
}

#[tokio::test]
async fn a_begun_attempt_ends_in_a_full_file() {
    let folder = Folder::new();
    let (store, leases) = filled(&folder).await;
    assert!(leases.len() > 100, "{}", leases.len());
    let upkeep = store.upkeep();
    assert_eq!(renew_all(&*upkeep, &leases).await.unwrap(), vec![Verdict::Applied; leases.len()]);
    for (n, lease) in leases.iter().enumerate() {
        let result = Finish::Completed(stored(vec![b'x'; 100 * 1024]));
        assert_eq!(kind(&store.finish(lease, &result).await), StoreErrorKind::Full, "{n}");
        let store: &dyn Store = if n % 2 == 0 { &store } else { &*upkeep };
        let written = match n % 4 {
            0 | 1 => store.finish(lease, &Finish::Completed(StoredResult::TooLarge { size: u64::MAX >> 1 })).await,
            2 => store.finish(lease, &Finish::Failed(StoredResult::Unencodable)).await,
            _ => store.release(lease, Release::Returned).await,
        };
        assert_eq!(written.unwrap(), Verdict::Applied, "{n}");
    }
}

#[tokio::test]
async fn a_result_larger_than_the_size_limit_of_the_file_is_too_large() {
    let folder = Folder::new();
    let (store, leases) = filled(&folder).await;
    let result = |bytes: usize| Finish::Completed(stored(vec![b'x'; bytes]));
    assert_eq!(kind(&store.finish(&leases[0], &result(256 * 1024)).await), StoreErrorKind::TooLarge);
    assert_eq!(kind(&store.upkeep().finish(&leases[0], &result(1024 * 1024)).await), StoreErrorKind::TooLarge);
    // A result is too large for the file: the engine records the completion without the result.
    let runs = AtomicU32::new(0);
    let body = async {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Error>("x".repeat(300 * 1024))
    };
    let folder = Folder::new();
    let store = SqliteStore::options().max_bytes(256 * 1024).open(folder.file()).await.unwrap();
    let policy = POLICY.max_result_bytes(1024 * 1024);
    let operation = Operation::new(&store, Key::new("test", "large"), policy);
    let (result, outcome) = observe(operation.run(body)).await;
    assert!(result.is_ok() && outcome.recorded(), "{outcome:?}");
    let (again, _) = call(&store, "large", &runs).await;
    assert!(matches!(again, Err(Error::ResultUnavailable { .. })), "{again:?}");
    assert_eq!(runs.into_inner(), 1);
}

#[tokio::test]
async fn expired_records_free_space_in_a_full_file() {
    let folder = Folder::new();
    let (store, leases) = filled(&folder).await;
    assert_eq!(kind(&store.reserve(&request(&store, "new")).await), StoreErrorKind::Full);
    raw(&folder.file()).execute("UPDATE idem_records SET listed_at = 1, expires_at = 2", []).unwrap();
    for n in 0..leases.len() / 2 {
        reserved(&store, &format!("new{n}")).await;
    }
}

#[tokio::test]
async fn a_file_that_was_removed_or_replaced_is_never_read_as_empty() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let runs = AtomicU32::new(0);
    assert_eq!(call(&store, "k", &runs).await.0.unwrap(), 1);
    let names = ["records.db", "records.db-wal", "records.db-shm"];
    let away = folder.path().join("away");
    fs::create_dir(&away).unwrap();
    let move_all = |from: &Path, to: &Path| {
        for name in names {
            fs::rename(from.join(name), to.join(name)).ok();
        }
    };
    move_all(folder.path(), &away);
    for _ in 0..3 {
        let (result, _) = call(&store, "k", &runs).await;
        assert!(matches!(&result, Err(Error::Store { .. })), "{result:?}");
        assert_eq!(kind(&store.inspect(&key("k")).await), StoreErrorKind::Unavailable);
        assert!(!folder.file().exists(), "an empty file would be a store without records");
    }
    // The store refuses another file at the same path. A file with a table of records would be accepted: an operator
    // may restore one.
    raw(&folder.file()).execute_batch("CREATE TABLE something (id)").unwrap();
    for _ in 0..3 {
        assert!(call(&store, "k", &runs).await.0.is_err());
        assert!(store.inspect(&key("k")).await.is_err());
    }
    for name in names {
        fs::remove_file(folder.path().join(name)).ok();
    }
    move_all(&away, folder.path());
    let outcome = loop {
        match call(&store, "k", &runs).await {
            (Ok(_), outcome) => break outcome,
            (Err(Error::Store { .. }), _) => {}
            (Err(error), _) => panic!("{error}"),
        }
    };
    assert!(outcome.replayed());
    assert_eq!(runs.into_inner(), 1);
}

/// Records `keys` keys through another process that opens `path`. Returns the number of recorded keys.
fn recorded_elsewhere(path: &Path, keys: usize) -> usize {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_recorder")]);
    let output = command.arg(format!("sqlite {}", path.display())).arg(keys.to_string()).output().unwrap();
    String::from_utf8(output.stdout).unwrap().lines().count()
}

/// Moves the file at `path` away, or removes it.
fn taken_away(path: &Path, moves: bool) {
    if moves { fs::rename(path, path.with_extension("away")).unwrap() } else { fs::remove_file(path).unwrap() }
}

#[tokio::test]
async fn no_process_uses_a_removed_or_replaced_log_or_index() {
    let ways = [(&["-shm"][..], false), (&["-shm"], true), (&["-wal", "-shm"], false), (&["-wal"], false)];
    for ((names, moves), is_first) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
        let folder = Folder::new();
        let store = open(&folder.file()).await;
        // These calls make the store open all of its connections.
        let held = reserved(&store, "held").await;
        renew_all(&store, std::slice::from_ref(&held)).await.unwrap();
        recorded(&store, "finished", 10).await;
        for _ in 0..3 {
            store.reserve(&request(&store, "finished")).await.unwrap();
        }
        for name in names {
            taken_away(&folder.path().join(format!("records.db{name}")), moves);
        }
        // If `is_first` is true, the store makes a call before another process does. The call notices the change, and
        // the store closes its connections and opens the present files.
        if is_first {
            let _ = store.reserve(&request(&store, "other")).await;
        }
        // A file without its log, but with the index of that log, can't be read by any process.
        let done = if names == ["-wal"] { 0 } else { recorded_elsewhere(&folder.file(), 3) };
        assert!(done == 3 || names == ["-wal"], "{names:?}: {done}");
        for n in (0..done).chain(0..done) {
            match store.reserve(&request(&store, "any").key(race::key(n))).await {
                Ok(Reservation::Finished { .. }) | Err(_) => {}
                other => panic!("{names:?}, moved: {moves}: {other:?}"),
            }
        }
        // The recorded results are visible in a newly opened store, and in the first store once it has reopened the
        // file.
        if done > 0 {
            let anew = open(&folder.file()).await;
            for store in [&anew, &store] {
                until("the result is replayed", async || {
                    let request = request(store, "any").key(race::key(0));
                    matches!(store.reserve(&request).await, Ok(Reservation::Finished { .. }))
                })
                .await;
            }
        }
    }
}

#[tokio::test]
async fn a_connection_of_the_user_keeps_no_store_at_a_removed_index() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let own = raw(&folder.file());
    let records = "SELECT count(*) FROM idem_records";
    own.query_row(records, [], |row| row.get::<_, i64>(0)).unwrap();
    taken_away(&folder.path().join("records.db-shm"), false);
    assert_eq!(recorded_elsewhere(&folder.file(), 1), 1);
    let request = || request(&store, "any").key(race::key(0));
    for _ in 0..5 {
        assert_eq!(kind(&store.reserve(&request()).await), StoreErrorKind::Unavailable);
        assert!(SqliteStore::open(folder.file()).await.is_err());
    }
    // An ordinary close would remove the other process's log, with its records.
    own.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).unwrap();
    drop(own);
    until("the result is replayed", async || {
        matches!(store.reserve(&request()).await, Ok(Reservation::Finished { .. }))
    })
    .await;
}

#[tokio::test]
async fn a_table_that_was_removed_is_never_read_as_empty() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    reserved(&store, "k").await;
    raw(&folder.file()).execute_batch("DROP TABLE idem_records").unwrap();
    for _ in 0..3 {
        assert_eq!(kind(&store.reserve(&request(&store, "k")).await), StoreErrorKind::Misconfigured);
        assert_eq!(kind(&store.inspect(&key("k")).await), StoreErrorKind::Misconfigured);
    }
}

/// Polls a future until it waits.
async fn begin<F: Future + Unpin>(future: &mut F)
where
    F::Output: std::fmt::Debug,
{
    let begun = futures::poll!(future);
    assert!(begun.is_pending(), "{begun:?}");
}

#[tokio::test]
async fn a_dropped_operation_is_skipped_unless_it_ends_an_attempt() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let (finished, released) = (reserved(&store, "finished").await, reserved(&store, "released").await);
    let reopened = reserved(&store, "reopened").await;
    assert_eq!(store.finish(&reopened, &done()).await.unwrap(), Verdict::Applied);
    for handle in [store.handle(), store.upkeep()] {
        let holder = raw(&folder.file());
        holder.execute_batch("BEGIN IMMEDIATE").unwrap();
        // The thread has taken some requests and waits for the lock. The other requests are in the thread's queue.
        let requests: Vec<_> = (0..20).map(|n| request(&store, &format!("k{n}"))).collect();
        for request in &requests {
            begin(&mut handle.reserve(request)).await;
            tokio::task::yield_now().await;
        }
        begin(&mut handle.finish(&finished, &done())).await;
        begin(&mut handle.release(&released, Release::Interrupted)).await;
        begin(&mut handle.reopen(&reopened.key, 1)).await;
        let last = request(&store, "last");
        let mut asked = handle.reserve(&last);
        begin(&mut asked).await;
        holder.execute_batch("COMMIT").unwrap();
        // This request was the last request in the queue.
        lease_of(asked.await);
        for request in requests {
            assert_eq!(store.inspect(&request.key).await.unwrap(), None, "{}", request.key);
        }
        let state = async |lease: &Lease| store.inspect(&lease.key).await.unwrap().unwrap().record.state;
        assert_eq!(state(&finished).await, done().state());
        assert_eq!(state(&released).await, State::Interrupted);
        assert!(matches!(state(&reopened).await, State::Completed(_)));
        assert_eq!(
            store.release(&lease_of(store.reserve(&last).await), Release::Returned).await.unwrap(),
            Verdict::Applied
        );
    }
}

#[tokio::test]
async fn a_call_is_bounded_by_its_response_timeout() {
    let folder = Folder::new();
    let options = SqliteStore::options().response_timeout(Duration::from_secs(7)).namespace("shop");
    let store = options.open(folder.file()).await.unwrap();
    assert_eq!(
        (store.response_timeout(), store.upkeep().response_timeout()),
        (Duration::from_secs(7), Duration::from_secs(7))
    );
    assert_eq!((Store::namespace(&store), open(&folder.file()).await.namespace()), ("shop", ""));
}

// Leases are renewed in time.

#[tokio::test]
async fn upkeep_goes_on_while_another_connection_holds_the_lock() {
    let folder = Folder::new();
    let options = SqliteStore::options().busy_timeout(Duration::from_millis(50));
    let store = options.open(folder.file()).await.unwrap();
    let upkeep = store.upkeep();
    assert!(std::ptr::eq(upkeep.context(), store.context()));
    assert!(Arc::ptr_eq(&upkeep, &store.upkeep()) && Arc::ptr_eq(&upkeep, &upkeep.upkeep()));
    let leases = [reserved(&store, "a").await, reserved(&store, "b").await];
    let late = reserved(&store, "late").await;
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let renewed = renew_all(&*upkeep, &leases);
    let failed = Finish::Failed(stored("late"));
    let ended = upkeep.finish(&late, &failed);
    let busy = async {
        // A call waits 50 ms for the lock and then fails, while the upkeep goes on waiting.
        assert_eq!(kind(&store.finish(&leases[0], &done()).await), StoreErrorKind::Unavailable);
        holder.execute_batch("COMMIT").unwrap();
    };
    let (renewed, ended, ()) = tokio::join!(renewed, ended, busy);
    assert_eq!(renewed.unwrap(), [Verdict::Applied; 2]);
    assert_eq!(ended.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn upkeep_does_not_wait_for_queued_writes() {
    const CALLS: usize = 300;
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let mut leases = Vec::new();
    for n in 0..CALLS {
        leases.push(reserved(&store, &format!("k{n}")).await);
    }
    let (kept, late) = (reserved(&store, "kept").await, reserved(&store, "late").await);
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    // The results have 64 MiB in all, so that writing them takes many transactions.
    let result = Finish::Completed(stored(vec![b'x'; 64 * 1024 * 1024 / CALLS]));
    let done_calls = AtomicU32::new(0);
    let calls = leases.iter().map(|lease| async {
        assert_eq!(store.finish(lease, &result).await.unwrap(), Verdict::Applied);
        done_calls.fetch_add(1, Ordering::SeqCst);
    });
    let mut calls = Box::pin(futures::future::join_all(calls));
    begin(&mut calls).await;
    let upkeep = store.upkeep();
    let keep = async {
        assert_eq!(renew_all(&*upkeep, std::slice::from_ref(&kept)).await.unwrap(), [Verdict::Applied]);
        assert_eq!(upkeep.release(&late, Release::Returned).await.unwrap(), Verdict::Applied);
        usize::try_from(done_calls.load(Ordering::SeqCst)).unwrap()
    };
    let free = async { holder.execute_batch("COMMIT").unwrap() };
    let (before, (), _) = tokio::join!(keep, free, calls);
    assert!(before < CALLS, "{before} of {CALLS} calls came first");
}

#[tokio::test]
async fn a_renewal_never_shortens_a_confirmed_lease() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let lease = reserved(&store, "k").await;
    let raw = raw(&folder.file());
    // The record looks as if a process whose clock was an hour ahead had renewed the lease.
    let hour = 3_600_000;
    raw.execute("UPDATE idem_records SET lapses_at = lapses_at + ?1, expires_at = expires_at + ?1", [hour]).unwrap();
    let times = || {
        let sql = "SELECT lapses_at, expires_at FROM idem_records";
        raw.query_row(sql, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))).unwrap()
    };
    let before = times();
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(times(), before);
    raw.execute("UPDATE idem_records SET lapses_at = 1", []).unwrap();
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    assert!(times().0 > 1 && times().1 == before.1, "{:?}", times());
}

#[tokio::test]
async fn each_of_very_many_renewals_gets_its_own_answer() {
    const LEASES: usize = 10_000;
    let folder = Folder::new();
    let store = SqliteStore::options().queue_capacity(100).open(folder.file()).await.unwrap();
    let lease = reserved(&store, "k").await;
    // Every second lease is a lease of a key without a record, so its renewal is refused.
    let leases: Vec<_> = (0..LEASES)
        .map(|n| match n % 2 {
            0 => lease.clone(),
            _ => {
                let mut lease = lease.clone();
                lease.key = key(&format!("k{n}"));
                lease
            }
        })
        .collect();
    let answers = renew_all(&*store.upkeep(), &leases).await.unwrap();
    let expected = [Verdict::Applied, Verdict::Refused].into_iter().cycle().take(LEASES);
    assert!(answers.into_iter().eq(expected));
}

/// Clock that stands still unless a test advances it, and that calls `looked` whenever it is read.
#[derive(Clone)]
struct Observed {
    clock: ManualClock,
    looked: Arc<Looked>,
}

/// Callback at a reading of the clock; takes the thread's name, and whether the wall clock is read.
type Looked = dyn Fn(&str, bool) + Send + Sync;

impl Observed {
    fn new(clock: &ManualClock, looked: impl Fn(&str, bool) + Send + Sync + 'static) -> Self {
        Self { clock: clock.clone(), looked: Arc::new(looked) }
    }

    fn look(&self, at_wall: bool) {
        (self.looked)(std::thread::current().name().unwrap_or_default(), at_wall);
    }
}

impl std::fmt::Debug for Observed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.clock.fmt(f)
    }
}

impl Clock for Observed {
    fn now(&self) -> Instant {
        self.look(false);
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.look(true);
        self.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.clock.sleep(duration)
    }

    fn entropy(&self) -> u128 {
        self.clock.entropy()
    }

    fn spawn(&self, task: Task) {
        self.clock.spawn(task);
    }
}

/// Renews many leases in one beat, by a clock that advances 1 ms at each reading of the upkeep thread. Between two
/// transactions of the beat, another connection and the writer of the same handle get the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beat_is_cut_into_short_transactions_and_lets_writers_in_between() {
    const LEASES: usize = 2_000;
    let folder = Folder::new();
    drop(open(&folder.file()).await);
    // At each reading of the clock by the upkeep thread, another connection tries to lock the file. In the first gap
    // between transactions the upkeep thread waits for a reservation by the writer.
    let other = raw(&folder.file());
    other.busy_timeout(Duration::ZERO).unwrap();
    let other = std::sync::Mutex::new(other);
    let (begun, gaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let (reserve, reserves) = mpsc::channel();
    let (reserved_meanwhile, was_reserved) = mpsc::channel();
    let was_reserved = std::sync::Mutex::new(was_reserved);
    let clock = ManualClock::new();
    let looked = {
        let (clock, begun, gaps) = (clock.clone(), Arc::clone(&begun), Arc::clone(&gaps));
        let in_transaction = AtomicBool::new(false);
        move |thread: &str, at_wall: bool| {
            if thread != "idem-sqlite-keep" || at_wall || !begun.load(Ordering::SeqCst) {
                return;
            }
            clock.advance(Duration::from_millis(1));
            let is_locked = other.lock().unwrap().execute_batch("BEGIN IMMEDIATE; COMMIT").is_err();
            let ended = in_transaction.swap(is_locked, Ordering::SeqCst) && !is_locked;
            if ended && gaps.fetch_add(1, Ordering::SeqCst) == 0 {
                reserve.send(()).unwrap();
                was_reserved.lock().unwrap().recv_timeout(Duration::from_secs(30)).expect("the writer has its turn");
            }
        }
    };
    let store = SqliteStore::options().clock(Observed::new(&clock, looked)).open(folder.file()).await.unwrap();
    let requests: Vec<_> = (0..LEASES).map(|n| request(&store, &format!("k{n}"))).collect();
    let leases = futures::future::join_all(requests.iter().map(|request| store.reserve(request))).await;
    let leases: Vec<_> = leases.into_iter().map(lease_of).collect();
    // Another thread, the writer, reserves a key in the first gap.
    let (writer, runtime) = (store.clone(), tokio::runtime::Handle::current());
    let writing = std::thread::spawn(move || {
        reserves.recv().unwrap();
        runtime.block_on(reserved(&writer, "meanwhile"));
        reserved_meanwhile.send(()).unwrap();
    });
    // After this call the upkeep thread has its connection.
    renew_all(&*store.upkeep(), &leases[..1]).await.unwrap();
    begun.store(true, Ordering::SeqCst);
    let renewed = renew_all(&*store.upkeep(), &leases).await.unwrap();
    begun.store(false, Ordering::SeqCst);
    assert!(renewed.iter().all(|verdict| *verdict == Verdict::Applied));
    writing.join().unwrap();
    let gaps = gaps.load(Ordering::SeqCst);
    assert!(gaps >= 20, "{gaps} gaps");
}

// Replays for lone callers, who read the file on their own thread.

/// Number of reads of records, by callers and by the reader thread.
#[derive(Default)]
struct Looks {
    by_callers: AtomicU32,
    by_reader: AtomicU32,
    /// Milliseconds by which the clock advances when a caller reads a record.
    slowness: AtomicU32,
}

impl Looks {
    fn now(&self) -> (u32, u32) {
        (self.by_callers.load(Ordering::SeqCst), self.by_reader.load(Ordering::SeqCst))
    }

    fn clock(self: &Arc<Self>, clock: &ManualClock) -> Observed {
        let (looks, inner) = (Arc::clone(self), clock.clone());
        Observed::new(clock, move |thread, at_wall| {
            if !at_wall {
                return;
            }
            if thread == "idem-sqlite-read" {
                looks.by_reader.fetch_add(1, Ordering::SeqCst);
            } else if !thread.starts_with("idem-") {
                looks.by_callers.fetch_add(1, Ordering::SeqCst);
                inner.advance(Duration::from_millis(looks.slowness.load(Ordering::SeqCst).into()));
            }
        })
    }

    /// Replays `name` until the caller's own thread reads the record.
    async fn warmed_up(&self, store: &SqliteStore, name: &str) {
        let before = self.now().0;
        while self.now().0 == before {
            assert!(replays(store, name).await);
        }
    }
}

async fn recorded(store: &SqliteStore, name: &str, bytes: usize) {
    let lease = reserved(store, name).await;
    let finish = Finish::Completed(stored(vec![b'1'; bytes]));
    assert_eq!(store.finish(&lease, &finish).await.unwrap(), Verdict::Applied);
}

async fn replays(store: &SqliteStore, name: &str) -> bool {
    matches!(store.reserve(&request(store, name)).await, Ok(Reservation::Finished { .. }))
}

#[tokio::test]
async fn a_lone_caller_reads_only_small_results_itself() {
    let folder = Folder::new();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let store = SqliteStore::options().clock(looks.clock(&clock)).open(folder.file()).await.unwrap();
    for (name, bytes) in [("k", 10), ("small", 16 * 1024), ("large", 16 * 1024 + 1)] {
        recorded(&store, name, bytes).await;
    }
    reserved(&store, "pending").await;
    looks.warmed_up(&store, "k").await;
    let (callers, reader) = looks.now();
    // Stores that open other files meanwhile do not affect this store's connections.
    let is_over = Arc::new(AtomicBool::new(false));
    let opens = std::thread::spawn({
        let is_over = Arc::clone(&is_over);
        move || {
            let others = Folder::new();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            while !is_over.load(Ordering::SeqCst) {
                drop(runtime.block_on(SqliteStore::options().open(others.file())).unwrap());
            }
        }
    });
    for _ in 0..1_000 {
        assert!(replays(&store, "k").await && replays(&store, "small").await);
    }
    is_over.store(true, Ordering::SeqCst);
    opens.join().unwrap();
    let callers = callers + 2_000;
    assert_eq!(looks.now(), (callers, reader), "no other thread has read the file");
    // The caller reads a record first, and passes every record that it can't return to the reader thread.
    assert!(replays(&store, "large").await);
    let ended = store.reserve(&request(&store, "pending")).await;
    assert!(matches!(ended, Ok(Reservation::InProgress { attempt: 1, .. })), "{ended:?}");
    assert_eq!(looks.now(), (callers + 2, reader + 2));
    assert_eq!(reserved(&store, "new").await.attempt, 1);
    assert_eq!(looks.now(), (callers + 3, reader + 3));
    // A caller that reads a record itself compares the fingerprint.
    let fingerprinted = |last| {
        let mut bytes = [1; 32];
        bytes[31] = last;
        request(&store, "fingerprint").fingerprint(Some(Fingerprint::from_bytes(bytes)))
    };
    let lease = lease_of(store.reserve(&fingerprinted(1)).await);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    looks.warmed_up(&store, "k").await;
    let mismatch = store.reserve(&fingerprinted(2)).await;
    assert!(matches!(mismatch, Ok(Reservation::FingerprintMismatch { attempt: 1 })), "{mismatch:?}");
    // A caller that reads a record itself notices the end of the retention.
    clock.advance(TTL);
    assert_eq!(reserved(&store, "k").await.attempt, 1);
}

/// Concurrent callers leave their reads to the reader thread, which is faster for several at a time.
#[tokio::test]
async fn concurrent_callers_use_the_reader_thread() {
    let folder = Folder::new();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let is_held = Arc::new(AtomicBool::new(false));
    let observed = {
        let (counting, is_held) = (looks.clock(&clock), Arc::clone(&is_held));
        Observed::new(&clock, move |thread, at_wall| {
            counting.look(at_wall);
            while thread.starts_with("idem-") && is_held.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        })
    };
    let store = SqliteStore::options().clock(observed).open(folder.file()).await.unwrap();
    recorded(&store, "k", 10).await;
    reserved(&store, "pending").await;
    looks.warmed_up(&store, "k").await;
    let pending = request(&store, "pending");
    is_held.store(true, Ordering::SeqCst);
    let mut first = Box::pin(store.reserve(&pending));
    begin(&mut first).await;
    let callers = looks.now().0;
    let mut second = Box::pin(replays(&store, "k"));
    begin(&mut second).await;
    assert_eq!(looks.now().0, callers, "the first caller is with the reader");
    is_held.store(false, Ordering::SeqCst);
    assert!(second.await);
    assert!(matches!(first.await, Ok(Reservation::InProgress { .. })));
    assert!(replays(&store, "k").await);
    assert_eq!(looks.now().0, callers + 1);
}

/// A caller that reads blocks no other caller.
#[test]
fn a_caller_that_reads_the_file_delays_no_other_caller() {
    let folder = Folder::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let shared: Arc<std::sync::OnceLock<SqliteStore>> = Arc::default();
    let nested = Arc::new(AtomicBool::new(false));
    let observed = {
        let (counting, shared, nested) = (looks.clock(&clock), Arc::clone(&shared), Arc::clone(&nested));
        Observed::new(&clock, move |thread, at_wall| {
            counting.look(at_wall);
            // At this moment the caller uses the connection of lone callers.
            if at_wall && !thread.starts_with("idem-") && nested.swap(false, Ordering::SeqCst) {
                let store = shared.get().unwrap().clone();
                let other = std::thread::spawn(move || {
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    runtime.block_on(replays(&store, "k"))
                });
                assert!(other.join().unwrap());
            }
        })
    };
    let store = runtime.block_on(SqliteStore::options().clock(observed).open(folder.file())).unwrap();
    shared.set(store.clone()).unwrap();
    runtime.block_on(async {
        recorded(&store, "k", 10).await;
        looks.warmed_up(&store, "k").await;
        let (callers, reader) = looks.now();
        nested.store(true, Ordering::SeqCst);
        assert!(replays(&store, "k").await);
        assert_eq!(looks.now(), (callers + 1, reader + 1), "a caller and the reader thread have read once more each");
    });
}

#[tokio::test]
async fn callers_leave_a_slow_disk_to_the_reader_thread_for_a_while() {
    let folder = Folder::new();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let store = SqliteStore::options().clock(looks.clock(&clock)).open(folder.file()).await.unwrap();
    recorded(&store, "k", 10).await;
    looks.warmed_up(&store, "k").await;
    let (callers, reader) = looks.now();
    looks.slowness.store(15, Ordering::SeqCst);
    for _ in 0..10 {
        assert!(replays(&store, "k").await);
    }
    assert_eq!(looks.now(), (callers + 2, reader + 8), "one slow read does not stop reads by callers");
    // Slow reads on callers' threads may take 5 ms in a row, and a twentieth of the time in the long run. The last read
    // took 15 ms. For the 10 ms in excess, no caller reads until 200 ms after the start of the last read. 15 ms of
    // these 200 ms have passed.
    clock.advance(Duration::from_millis(184));
    assert!(replays(&store, "k").await);
    assert_eq!(looks.now(), (callers + 2, reader + 9));
    looks.slowness.store(0, Ordering::SeqCst);
    clock.advance(Duration::from_millis(1));
    for _ in 0..10 {
        assert!(replays(&store, "k").await);
    }
    assert_eq!(looks.now(), (callers + 12, reader + 9));
}

#[tokio::test]
async fn a_lone_caller_notices_that_its_file_was_removed_or_replaced() {
    let folder = Folder::new();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let store = SqliteStore::options().clock(looks.clock(&clock)).open(folder.file()).await.unwrap();
    recorded(&store, "k", 10).await;
    looks.warmed_up(&store, "k").await;
    let callers = looks.now().0;
    let away = folder.path().join("away");
    fs::create_dir(&away).unwrap();
    for name in ["records.db", "records.db-wal", "records.db-shm"] {
        fs::rename(folder.path().join(name), away.join(name)).unwrap();
    }
    let removed = store.reserve(&request(&store, "k")).await;
    assert_eq!(kind(&removed), StoreErrorKind::Unavailable, "{removed:?}");
    // The file now contains another record of the key. The store accepts this record: an operator may restore a file.
    let other = open(&folder.file()).await;
    reserved(&other, "k").await;
    let replaced = loop {
        match store.reserve(&request(&store, "k")).await {
            Ok(answer) => break answer,
            Err(error) => assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}"),
        }
    };
    assert!(matches!(replaced, Reservation::InProgress { .. }), "{replaced:?}");
    assert_eq!(looks.now().0, callers, "no caller has read the removed file");
    // After a pause the store opens the connection of lone callers again.
    clock.advance(Duration::from_secs(1));
    recorded(&other, "other", 10).await;
    looks.warmed_up(&store, "other").await;
}

#[tokio::test]
async fn the_connection_of_lone_callers_is_closed_with_the_store() {
    let folder = Folder::new();
    let (looks, clock) = (Arc::new(Looks::default()), ManualClock::new());
    let store = SqliteStore::options().clock(looks.clock(&clock)).open(folder.file()).await.unwrap();
    recorded(&store, "k", 10).await;
    looks.warmed_up(&store, "k").await;
    drop(store);
    // SQLite removes the log when the last connection closes.
    while folder.path().join("records.db-wal").exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

// Forked processes.

fn fork(folder: &Folder, how: &str) {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_forker")]).arg(folder.file()).arg(how);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn a_forked_child_and_its_parent_both_record() {
    for how in ["inherited", "anew"] {
        let folder = Folder::new();
        fork(&folder, how);
        let store = open(&folder.file()).await;
        let names = (0..20).map(|n| format!("parent-{n}")).chain((0..40).map(|n| format!("child-{n}")));
        for name in names.chain(["before".to_owned()]) {
            let record = store.inspect(&key(&name)).await.unwrap().unwrap_or_else(|| panic!("{how}: {name} is lost"));
            assert_eq!(record.record.state, State::Completed(stored(name.clone())), "{how}: {name}");
        }
        let check: String = raw(&folder.file()).query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(check, "ok");
    }
}

/// Other processes may write to the file before a forked child closes it: the child's close must not clean up the file.
#[tokio::test]
async fn a_forked_child_removes_no_records_of_later_processes() {
    let folder = Folder::new();
    fork(&folder, "late");
    let store = open(&folder.file()).await;
    for n in 0..10 {
        let record = store.inspect(&race::key(n)).await.unwrap().unwrap_or_else(|| panic!("{n} is lost"));
        assert!(record.record.is_finished(), "{n}");
    }
}

#[tokio::test]
async fn a_child_that_was_forked_in_the_middle_of_a_write_does_not_change_the_file() {
    let folder = Folder::new();
    drop(open(&folder.file()).await);
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    fork(&folder, "busy");
    holder.execute_batch("COMMIT").unwrap();
}

#[tokio::test]
async fn a_cancelled_caller_fails_no_other_call() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let runs = Arc::new(AtomicU32::new(0));
    let calls: Vec<_> = (0..1000)
        .map(|n| {
            let (store, runs) = (store.clone(), Arc::clone(&runs));
            tokio::spawn(async move { call(&store, &format!("k{n}"), &runs).await.0 })
        })
        .collect();
    tokio::task::yield_now().await;
    for (n, call) in calls.into_iter().enumerate() {
        if n % 2 == 0 {
            call.abort();
        } else {
            call.await.unwrap().unwrap();
        }
    }
    store.flush().await;
    for n in 0..1000 {
        assert!(call(&store, &format!("k{n}"), &runs).await.0.is_ok(), "key {n} is free or finished");
    }
}

#[test]
fn pending_writes_survive_the_end_of_the_runtime() {
    let folder = Folder::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let store = first.block_on(open(&folder.file()));
    let handler = {
        let store = store.clone();
        async move {
            let operation = Operation::new(&store, Key::new("test", "k"), POLICY);
            operation.run(std::future::pending::<Result<u32, Error>>()).await
        }
    };
    first.block_on(async {
        let running = tokio::spawn(handler);
        while store.inspect(&key("k")).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        assert!(!running.is_finished());
    });
    // The drop of the runtime drops the handler, outside of any runtime.
    drop(first);
    second.block_on(store.flush());
    assert_eq!(second.block_on(store.inspect(&key("k"))).unwrap().unwrap().record.state, State::Released);
}

// Several handles and processes.

/// When most reservations are replays, the reader thread handles every reservation first.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_reservation_among_replays_is_decided_only_once() {
    let folder = Folder::new();
    let (store, other) = (open(&folder.file()).await, open(&folder.file()).await);
    let runs = Arc::new(AtomicU32::new(0));
    assert_eq!(call(&store, "done", &runs).await.0.unwrap(), 1);
    for n in 0..100 {
        for _ in 0..32 {
            assert!(call(&store, "done", &runs).await.1.replayed());
        }
        let name = format!("k{n}");
        let tasks: Vec<_> = (0..8)
            .map(|task| {
                let store = if task == 0 { other.clone() } else { store.clone() };
                let (name, runs) = (name.clone(), Arc::clone(&runs));
                tokio::spawn(async move { call(&store, &name, &runs).await.1 })
            })
            .collect();
        let mut executed = 0;
        for task in tasks {
            executed += u32::from(task.await.unwrap().executed());
        }
        assert_eq!(executed, 1);
        let lease = reserved(&store, &format!("{name}-released")).await;
        assert_eq!(store.release(&lease, Release::Returned).await.unwrap(), Verdict::Applied);
        assert_eq!(reserved(&store, &format!("{name}-released")).await.attempt, 2);
    }
    assert_eq!(runs.load(Ordering::SeqCst), 101);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn handles_of_one_process_share_the_file() {
    let folder = Folder::new();
    let policy = POLICY.in_progress(InProgress::Wait(LEASE));
    let runs: Arc<Vec<AtomicU32>> = Arc::new((0..200).map(|_| AtomicU32::new(0)).collect());
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let store = open(&folder.file()).await;
        for task in 0..16 {
            let (store, runs) = (store.clone(), Arc::clone(&runs));
            tasks.spawn(async move {
                for n in (0..200).map(|n| (n + task * 12) % 200) {
                    let body = async { Ok::<_, Error>(runs[n].fetch_add(1, Ordering::SeqCst)) };
                    let operation = Operation::new(&store, Ok(key(&n.to_string())), policy);
                    assert_eq!(operation.run(body).await.unwrap(), 0);
                }
            });
        }
    }
    tasks.join_all().await;
    assert!(runs.iter().all(|runs| runs.load(Ordering::SeqCst) == 1));
}

#[tokio::test]
async fn a_waiter_of_another_handle_is_woken() {
    let folder = Folder::new();
    let (owner, waiting) = (open(&folder.file()).await, open(&folder.file()).await);
    let lease = reserved(&owner, "k").await;
    let runs = AtomicU32::new(0);
    let policy = POLICY.in_progress(InProgress::Wait(LEASE));
    let body = async { Ok::<_, Error>(runs.fetch_add(1, Ordering::SeqCst)) };
    let duplicate = observe(Operation::new(&waiting, Key::new("test", "k"), policy).run(body));
    let finish = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(owner.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    };
    let started = std::time::Instant::now();
    let ((result, outcome), ()) = tokio::join!(duplicate, finish);
    assert_eq!(result.unwrap(), 42);
    assert!(outcome.replayed() && outcome.waited());
    assert!(started.elapsed() < LEASE / 2, "woken, not timed out");
    assert_eq!(runs.into_inner(), 0);
}

#[tokio::test]
async fn a_dropped_store_closes_its_file() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    reserved(&store, "k").await;
    let handle = store.handle();
    drop(store);
    assert!(handle.inspect(&key("k")).await.unwrap().is_some());
    assert!(folder.path().join("records.db-wal").exists());
    drop(handle);
    // SQLite removes the log when the last connection closes.
    while folder.path().join("records.db-wal").exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs a process that is killed while it records. Returns the number of results that it reported as recorded.
fn recorded_before_a_kill(path: &Path, keys: usize, kill_after: usize) -> usize {
    let mut recorder = Command::new("setpriv")
        .args(["--pdeathsig", "KILL", env!("CARGO_BIN_EXE_recorder")])
        .args([&format!("sqlite {}", path.display()), &keys.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(recorder.stdout.take().unwrap()).lines();
    let mut told = 0;
    for line in lines {
        assert_eq!(line.unwrap(), told.to_string());
        told += 1;
        if told == kill_after {
            recorder.kill().unwrap();
        }
    }
    recorder.wait().unwrap();
    told
}

#[tokio::test]
async fn a_confirmed_result_of_a_killed_process_is_recorded() {
    const KEYS: usize = 400;
    let folder = Folder::new();
    let mut killed = 0;
    for kill_after in [1, 7, 50, 200] {
        let told = recorded_before_a_kill(&folder.file(), KEYS, kill_after);
        assert!(told >= kill_after);
        killed += u32::from(told < KEYS);
        let store = open(&folder.file()).await;
        for n in 0..told {
            let record = store.inspect(&race::key(n)).await.unwrap().expect("recorded").record;
            assert_eq!(record.state, State::Completed(stored(n.to_string())), "{n}");
        }
        // The next process takes over the dead attempt, once its lease has lapsed.
        while let Some(Some(lapses_in)) = store
            .inspect(&race::key(told))
            .await
            .unwrap()
            .map(|it| it.lapses_in)
            .filter(|it| *it != Some(Duration::ZERO))
        {
            tokio::time::sleep(lapses_in).await;
        }
    }
    assert!(killed > 0, "no process was killed in the middle of a call");
    assert_eq!(recorded_before_a_kill(&folder.file(), KEYS, usize::MAX), KEYS);
    let check: String = raw(&folder.file()).query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(check, "ok");
}

#[tokio::test]
async fn processes_race_for_the_same_keys() {
    let folder = Folder::new();
    let spec = format!("sqlite {}", folder.file().display());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let effects = race.run(async {}).await;
    assert!(
        effects.repeated() <= race.kills,
        "only a killed process may leave an effect without a record: {effects:?}"
    );
}

/// SQL that inserts rows of completed operations, and the row of an interrupted operation whose key sorts last.
const MANY_ROWS: &str = "WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n WHERE n < 2099) \
    INSERT INTO idem_records (key, format, state, owner, attempt, attempts_used, on_crash_fail, expires_at, listed_at, \
    first_seen_at, began_at) SELECT printf('1/test/%05d', n), 1, iif(n = 2099, 'interrupted', 'completed'), \
    x'00112233445566778899aabbccddeeff', 1, 1, 0, 4102444800000, 4102444800000, 0, 0 FROM n";

#[tokio::test]
async fn each_page_of_a_list_continues_after_the_rows_of_the_previous_page() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    raw(&folder.file()).execute_batch(MANY_ROWS).unwrap();
    let mut filter = Filter::new().uncertain();
    let first = store.list(&filter).await.unwrap();
    assert!(first.records.is_empty() && first.next.is_some(), "a page has a bound: {first:?}");
    filter = filter.after(first.next);
    let second = store.list(&filter).await.unwrap();
    let keys: Vec<_> = second.records.iter().map(|(key, _)| key.to_string()).collect();
    assert_eq!((keys, second.next), (vec!["test/02099".to_owned()], None));
    let stats = store.operator().stats(&Filter::new(), u64::MAX).await.unwrap();
    assert_eq!((stats.total().total(), stats.total().of(Standing::Completed)), (2100, 2099));
    // The list shows and counts an unreadable row as damaged.
    raw(&folder.file()).execute_batch("UPDATE idem_records SET owner = x'00' WHERE key = '1/test/00007'").unwrap();
    let stats = store.operator().stats(&Filter::new(), u64::MAX).await.unwrap();
    assert_eq!((stats.total().total(), stats.total().of(Standing::Damaged), stats.unreadable), (2100, 1, 0));
}

#[tokio::test]
async fn readable_columns_show_the_holder_of_a_key() {
    let folder = Folder::new();
    let store = SqliteStore::options().holder("worker-7").open(folder.file()).await.unwrap();
    call(&store, "k", &AtomicU32::new(0)).await.0.unwrap();
    let found = store.inspect(&key("k")).await.unwrap().expect("a record");
    let noted = Decision::discard(&key("k"), &found).by("alice").reason("INC-7");
    assert_eq!(store.decide(&noted).await.unwrap(), DecisionAnswer::Applied);
    let sql = "SELECT holder, decided_by, decided_reason FROM idem_records";
    let columns: (String, String, String) =
        raw(&folder.file()).query_row(sql, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?))).unwrap();
    assert!(columns.0.ends_with(&format!("/{}/worker-7", std::process::id())), "{columns:?}");
    assert_eq!((&*columns.1, &*columns.2), ("alice", "INC-7"));
    store.ping().await.unwrap();
}

/// The threads of a SQLite store use real time. If tokio's time is paused, they could renew no lease, and each of their
/// answers would seem late. So the store refuses the call, with an error that says what to do.
#[tokio::test(start_paused = true)]
async fn a_test_with_paused_time_gets_an_immediate_hint() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let runs = AtomicU32::new(0);
    let (result, outcome) = call(&store, "k", &runs).await;
    let Err(Error::Store { source, started: false, .. }) = result else { panic!("{result:?}, {outcome:?}") };
    assert_eq!(source.kind(), StoreErrorKind::Misconfigured);
    assert!(source.to_string().contains("use `MemoryStore` in this test, or let its time run"), "{source}");
    assert_eq!(runs.load(Ordering::SeqCst), 0);
}

// Operations that need no record.

/// All rows of the tables of docs/natural.md.
fn rows(connection: &Connection) -> Vec<String> {
    let mut rows = Vec::new();
    for table in natural::TABLES {
        let mut statement = connection.prepare(&format!("SELECT * FROM {table} ORDER BY 1")).unwrap();
        let columns = statement.column_count();
        let values = |row: &rusqlite::Row<'_>| (0..columns).map(|n| row.get(n)).collect::<Result<Vec<Value>, _>>();
        let found = statement.query_map((), values).unwrap();
        rows.extend(found.map(|row| format!("{table}: {:?}", row.unwrap())));
    }
    rows
}

#[test]
fn the_statements_about_natural_idempotency_do_what_their_page_says() {
    let connection = Connection::open_in_memory().unwrap();
    let (tables, blocks) = natural::blocks();
    connection.execute_batch(tables).unwrap();
    for block in &blocks {
        let mut states = vec![rows(&connection)];
        for _ in 0..2 {
            connection.execute_batch(block.sql).unwrap();
            states.push(rows(&connection));
        }
        assert_ne!(states[0], states[1], "the first run has an effect: {block:?}");
        assert_eq!(states[1] == states[2], block.is_idempotent, "{block:?}: {states:?}");
    }
    let mut prices = connection.prepare("SELECT article, cents FROM prices ORDER BY 1").unwrap();
    let prices = prices.query_map((), |row| Ok((row.get(0)?, row.get(1)?))).unwrap();
    assert_eq!(prices.collect::<Result<Vec<(i64, i64)>, _>>().unwrap(), natural::PRICES);
    assert_eq!(blocks.iter().filter(|block| block.is_idempotent).count(), 6);
}

/// Returns the number of transactions in the log. The last page of a transaction names the size of the database.
fn commits_in(log: &Path) -> usize {
    let log = fs::read(log).unwrap();
    let number = |at: usize| u32::from_be_bytes(log[at..at + 4].try_into().unwrap());
    let frame = 24 + number(8) as usize;
    let (header, frames) = log.split_at(32);
    let is_current = |frame: &&[u8]| frame[8..16] == header[16..24];
    frames.chunks_exact(frame).take_while(is_current).filter(|frame| frame[4..8] != [0; 4]).count()
}

#[tokio::test]
async fn entries_of_journals_share_commits() {
    const HANDLERS: usize = 200;
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    // While a transaction reads, SQLite does not start the log anew.
    let reader = raw(&folder.file());
    let count = |connection: &Connection| -> i64 {
        connection.query_row("SELECT count(*) FROM idem_records", [], |row| row.get(0)).unwrap()
    };
    reader.execute_batch("BEGIN").unwrap();
    assert_eq!(count(&reader), 0);
    let log = folder.path().join("records.db-wal");
    let before = commits_in(&log);
    let handlers = (0..HANDLERS).map(|n| {
        let body = async move {
            let attempt = current()?;
            for name in ["charge", "reserve", "book"] {
                attempt.step(name).run(async move |_| Ok::<_, Error>(n)).await?;
            }
            Ok::<_, Error>(n)
        };
        Operation::new(&store, Ok(key(&n.to_string())), POLICY).run(body)
    });
    for (n, result) in futures::future::join_all(handlers).await.into_iter().enumerate() {
        assert_eq!(result.unwrap(), n);
    }
    let commits = commits_in(&log) - before;
    assert!(store.metrics().prometheus_text().contains("op=\"append\"} 600\n"), "each entry is a write");
    // Reservations and completions share commits, too: without shared entries there are more commits than entries.
    assert!(commits < 3 * HANDLERS, "{commits} commits");
}

#[tokio::test]
async fn a_message_costs_one_write_more() {
    let folder = Folder::new();
    let store = open(&folder.file()).await.with_sender(Confirming);
    for n in 1..4 {
        assert!(publish(&store, &format!("published {n}")).await.executed());
        assert!(publish(&store, &format!("published {n}")).await.replayed());
        let metrics = store.metrics().prometheus_text();
        // Each of these operations is one commit; a reservation that finds a result is none.
        for (op, count) in [("reserve", 2 * n), ("finish", n), ("decide", n), ("inspect", 0)] {
            let counted = format!("idem_store_seconds_count{{store=\"sqlite\",op=\"{op}\"}} {count}\n");
            assert!(metrics.contains(&counted), "{counted}{metrics}");
        }
    }
}
