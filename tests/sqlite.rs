//! `SqliteStore` on real files: its table, its errors, its handles and processes, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real files")]
#![allow(clippy::format_collect, reason = "a handful of bytes")]
// Deep futures: a store, its queue and its threads, within a test.
#![recursion_limit = "256"]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use idem_runtime::{
    Error, Fingerprint, Finish, InProgress, Json, Key, Lease, OnCrash, Operation, OwnerToken, Record, Release,
    Reservation, ReserveRequest, SqliteOptions, SqliteStore, State, Store, StoreError, StoreErrorKind, StoredResult,
    Synchronous, Verdict, observe, record_values, renew_all, run,
};
use idem_tests::calls::{LEASE, POLICY, TTL, call, done, key, lease_of, request, reserved, stored};
use idem_tests::race::{self, Race};
use idem_tests::sqlite::{Folder, raw};
use rusqlite::Connection;

async fn open(path: &Path) -> SqliteStore {
    SqliteStore::open(path).await.unwrap()
}

async fn refusal(options: SqliteOptions, path: impl AsRef<Path>) -> StoreError {
    options.open(path).await.expect_err("refused")
}

fn kind<T: std::fmt::Debug>(answer: &Result<T, StoreError>) -> StoreErrorKind {
    answer.as_ref().expect_err("fails").kind()
}

// The stored form.

/// 2100-01-01: replaces every time, so that rows can be compared.
const LATER: i64 = 4_102_444_800_000;

/// The end of an attempt, if it has one.
type End = Option<Result<Finish, Release>>;

/// Writes records in every state.
async fn write_all(store: &SqliteStore) -> Vec<(Key, Record)> {
    let fingerprint = Some(Fingerprint::from_bytes([0x5a; 32]));
    let result = stored(&br#"{"a":1}"#[..]);
    let ends: [(&str, Option<Fingerprint>, End); 10] = [
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
    ];
    let mut records = Vec::new();
    for (name, fingerprint, end) in ends {
        let owner = OwnerToken::from_bytes(*b"0123456789abcdef");
        let on_crash = if name.starts_with("pending-") { OnCrash::Fail } else { OnCrash::Retry };
        let lease = Duration::from_secs(30);
        let request = ReserveRequest { owner, fingerprint, on_crash, lease, ..request(store, name) };
        let lease = lease_of(store.reserve(&request).await);
        match &end {
            None => {}
            Some(Ok(finish)) => assert_eq!(store.finish(&lease, finish).await.unwrap(), Verdict::Applied),
            Some(Err(release)) => assert_eq!(store.release(&lease, *release).await.unwrap(), Verdict::Applied),
        }
        let mut record = Record::first(&request);
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

/// The table as SQL, its times replaced.
fn dump(connection: &Connection) -> String {
    let mut text = String::new();
    let mut schema =
        connection.prepare("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL ORDER BY type DESC, name").unwrap();
    for sql in schema.query_map([], |row| row.get::<_, String>(0)).unwrap() {
        writeln!(text, "{};", sql.unwrap()).unwrap();
    }
    let times = format!(
        "UPDATE idem_records SET expires_at = {LATER}, listed_at = {LATER}, \
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
async fn the_written_form_is_pinned() {
    let golden = include_str!("golden/sqlite-v1.txt");
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let records = write_all(&store).await;
    drop(store);
    let written = dump(&raw(&folder.file()));
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/sqlite-v1.txt"), &written).unwrap();
    }
    assert_eq!(written, golden, "a released form never changes: give a new one a new version");

    // The pinned rows can be read.
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
async fn times_are_milliseconds_of_the_wall_clock() {
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
    // Time passes: all rows are listed for clean-up, and all but one have expired.
    raw.execute("UPDATE idem_records SET listed_at = 1, expires_at = iif(state = 'P', expires_at, 2)", []).unwrap();
    assert_eq!(store.inspect(&key("finished0")).await.unwrap(), None, "expired, cleaned up or not");
    // Each reservation deletes two expired rows, in batches of eight reservations, so that rows can't pile up. This was the
    // 101st reservation.
    for n in 0..11 {
        reserved(&store, &format!("new{n}")).await;
    }
    assert!((80..=81).contains(&rows()), "{} rows", rows());
    // An unused store can be purged, in bounded steps.
    assert!(store.purge(5).await.unwrap() <= 5);
    while store.purge(50).await.unwrap() > 0 {}
    assert_eq!(rows(), 12, "eleven new ones, and the one that is alive");
    assert_eq!(store.finish(&alive, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn the_table_lies_beside_the_applications_own() {
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
async fn paths_and_names_that_can_not_be_used_are_refused() {
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
    // Never taken for a URI, however SQLite was compiled.
    let store = SqliteStore::open(folder.path().join("file:x?mode=memory")).await.unwrap();
    reserved(&store, "k").await;
    assert!(folder.path().join("file:x?mode=memory").exists());
}

#[tokio::test]
async fn files_of_others_are_left_alone() {
    let folder = Folder::new();
    let text = "not a database, and longer than the header of one: ".repeat(10);
    fs::write(folder.file(), &text).unwrap();
    let error = refusal(SqliteStore::options(), folder.file()).await;
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("not a SQLite database"), "{error}");
    assert_eq!(fs::read_to_string(folder.file()).unwrap(), text);
}

#[tokio::test]
async fn tables_of_others_and_of_later_releases_are_left_alone() {
    let folder = Folder::new();
    drop(open(&folder.file()).await);
    let raw = raw(&folder.file());
    raw.execute_batch("CREATE TABLE theirs (key TEXT, state TEXT); INSERT INTO theirs VALUES ('a', 'b');").unwrap();
    raw.execute_batch("ALTER TABLE idem_records ADD COLUMN region TEXT").unwrap();
    for (table, words) in [("theirs", "not one of this library"), ("idem_records", "does not know (region)")] {
        let error = refusal(SqliteStore::options().table(table), folder.file()).await;
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{table}: {error}");
        assert!(error.to_string().contains(words), "{table}: {error}");
    }
}

#[tokio::test]
async fn rows_of_others_are_left_alone() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let raw = raw(&folder.file());
    let spoilt = [
        ("later", "format = 2", "format 2"),
        ("later-and-expired", "format = 2, expires_at = 1", "format 2"),
        ("no-format", "format = 'one'", "damaged"),
        ("state", "state = 'X'", "damaged"),
        ("state-blob", "state = x'50'", "damaged"),
        ("owner", "owner = x'00'", "damaged"),
        ("owner-text", "owner = '0123456789abcdef'", "damaged"),
        ("attempt", "attempt = 0", "damaged"),
        ("starts", "starts = 7", "damaged"),
        ("flag", "on_crash_fail = 2", "damaged"),
        ("expiry", "expires_at = 'never'", "damaged"),
        ("lapse", "lapses_at = NULL", "damaged"),
        ("fingerprint", "fingerprint = x'00'", "damaged"),
    ];
    for (name, how, words) in spoilt {
        let lease = reserved(&store, name).await;
        raw.execute(&format!("UPDATE idem_records SET {how} WHERE key = '1/test/{name}'"), []).unwrap();
        let row = || {
            let sql = "SELECT format || state || hex(owner) || attempt || starts || expires_at FROM idem_records WHERE key = ?1";
            raw.query_row(sql, [format!("1/test/{name}")], |row| row.get::<_, String>(0)).unwrap()
        };
        let before = row();
        for _ in 0..2 {
            let runs = AtomicU32::new(0);
            let (result, _) = call(&store, name, &runs).await;
            let Err(Error::Store { source, .. }) = result else { panic!("{name}: {result:?}") };
            assert_eq!(source.kind(), StoreErrorKind::Corrupt, "{name}");
            assert!(source.to_string().contains(words), "{name}: {source}");
            assert_eq!(runs.into_inner(), 0, "{name}");
            assert_eq!(kind(&store.inspect(&lease.key).await), StoreErrorKind::Corrupt, "{name}");
            assert_eq!(kind(&store.reopen(&lease.key, 1).await), StoreErrorKind::Corrupt, "{name}");
        }
        let stranger = Lease { owner: store.heartbeats().new_owner(), ..lease };
        for answer in [
            store.finish(&stranger, &done()).await,
            store.release(&stranger, Release::Returned).await,
            renew_all(&store, std::slice::from_ref(&stranger)).await.map(|answers| answers[0]),
        ] {
            assert!(!matches!(answer, Ok(Verdict::Applied)), "{name}: {answer:?}");
        }
        store.purge(1000).await.unwrap();
        assert_eq!(row(), before, "{name}");
    }
}

#[tokio::test]
async fn results_beyond_what_sqlite_holds_are_refused_before_they_are_written() {
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

/// The output of another process that opens `path` and has no more rights than the file modes give it.
fn open_as_ordinary_process(path: &Path) -> String {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]);
    // The superuser may write everywhere, unless it gives that up.
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
async fn what_is_read_only_is_refused() {
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

// Faults.

#[tokio::test]
async fn a_lock_that_is_held_for_too_long_is_an_answer_and_replays_need_none() {
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
async fn a_lock_that_is_let_go_in_time_is_waited_for() {
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
async fn every_call_ends_and_says_whether_it_was_begun() {
    let folder = Folder::new();
    let options = SqliteStore::options().response_timeout(Duration::from_millis(100)).queue_capacity(1);
    let store = options.busy_timeout(Duration::from_secs(600)).open(folder.file()).await.unwrap();
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (begun, waiting, refused) = (request(&store, "begun"), request(&store, "waiting"), request(&store, "refused"));
    let answer = store.reserve(&begun).await;
    assert_eq!(kind(&answer), StoreErrorKind::Unconfirmed, "it waits for the lock: {answer:?}");
    let (waited, answer) = tokio::join!(store.reserve(&waiting), store.reserve(&refused));
    assert_eq!(kind(&waited), StoreErrorKind::Unavailable, "nobody has taken it up: {waited:?}");
    assert!(answer.unwrap_err().to_string().contains("too many calls"));
    holder.execute_batch("COMMIT").unwrap();
    store.flush().await;
    assert_eq!(store.inspect(&waiting.key).await.unwrap(), None);
    assert_eq!(store.inspect(&refused.key).await.unwrap(), None);
    // Its caller had gone by the time the lock was free.
    assert_eq!(store.inspect(&begun.key).await.unwrap(), None);
    assert_eq!(lease_of(store.reserve(&begun).await).attempt, 1);
}

#[tokio::test]
async fn a_full_store_writes_nothing_and_says_so() {
    let folder = Folder::new();
    let store = SqliteStore::options().max_bytes(256 * 1024).open(folder.file()).await.unwrap();
    let runs = AtomicU32::new(0);
    assert_eq!(call(&store, "first", &runs).await.0.unwrap(), 1);
    let held = reserved(&store, "held").await;
    let (large, beside) = (reserved(&store, "large").await, reserved(&store, "beside").await);
    // A write that has no room fails alone, whichever others are in the same transaction.
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
    // A handle without the limit can write.
    let roomy = open(&folder.file()).await;
    assert_eq!(roomy.finish(&held, &done).await.unwrap(), Verdict::Applied);
}

/// A store whose file is full, with attempts that have begun.
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
async fn what_has_begun_can_be_ended_in_a_full_file() {
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
async fn a_result_that_no_file_of_that_size_holds_is_too_large() {
    let folder = Folder::new();
    let (store, leases) = filled(&folder).await;
    let result = |bytes: usize| Finish::Completed(stored(vec![b'x'; bytes]));
    assert_eq!(kind(&store.finish(&leases[0], &result(256 * 1024)).await), StoreErrorKind::TooLarge);
    assert_eq!(kind(&store.upkeep().finish(&leases[0], &result(1024 * 1024)).await), StoreErrorKind::TooLarge);
    // The engine leaves the result out, and the operation is recorded.
    let runs = AtomicU32::new(0);
    let body = async {
        runs.fetch_add(1, Ordering::SeqCst);
        Ok::<_, Error>("x".repeat(300 * 1024))
    };
    let folder = Folder::new();
    let store = SqliteStore::options().max_bytes(256 * 1024).open(folder.file()).await.unwrap();
    let policy = POLICY.max_result_bytes(1024 * 1024);
    let operation = Operation::new(&store, Key::new("test", "large"), policy);
    let (result, outcome) = observe(run(operation, record_values::<Json>(), body)).await;
    assert!(result.is_ok() && outcome.recorded(), "{outcome:?}");
    let (again, _) = call(&store, "large", &runs).await;
    assert!(matches!(again, Err(Error::ResultUnavailable { .. })), "{again:?}");
    assert_eq!(runs.into_inner(), 1);
}

#[tokio::test]
async fn what_has_expired_makes_room_in_a_full_file() {
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
    // Another file is not taken for the first one; a file with a table of records is accepted, as the operator's decision.
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
async fn what_nobody_waits_for_is_not_begun_unless_it_ends_an_attempt() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let (finished, released) = (reserved(&store, "finished").await, reserved(&store, "released").await);
    let reopened = reserved(&store, "reopened").await;
    assert_eq!(store.finish(&reopened, &done()).await.unwrap(), Verdict::Applied);
    for handle in [store.handle(), store.upkeep()] {
        let holder = raw(&folder.file());
        holder.execute_batch("BEGIN IMMEDIATE").unwrap();
        // The thread has taken some of them, and waits for the lock; the others wait in its queue.
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
        // This request was the last one in the queue.
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

// Leases are kept.

#[tokio::test]
async fn upkeep_goes_on_while_others_hold_the_lock() {
    let folder = Folder::new();
    let options = SqliteStore::options().busy_timeout(Duration::from_millis(50));
    let store = options.open(folder.file()).await.unwrap();
    let upkeep = store.upkeep();
    assert!(std::ptr::eq(upkeep.heartbeats(), store.heartbeats()));
    assert!(Arc::ptr_eq(&upkeep, &store.upkeep()) && Arc::ptr_eq(&upkeep, &upkeep.upkeep()));
    let leases = [reserved(&store, "a").await, reserved(&store, "b").await];
    let late = reserved(&store, "late").await;
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    let renewed = renew_all(&*upkeep, &leases);
    let failed = Finish::Failed(stored("late"));
    let ended = upkeep.finish(&late, &failed);
    let busy = async {
        // A call has given up by now.
        assert_eq!(kind(&store.finish(&leases[0], &done()).await), StoreErrorKind::Unavailable);
        holder.execute_batch("COMMIT").unwrap();
    };
    let (renewed, ended, ()) = tokio::join!(renewed, ended, busy);
    assert_eq!(renewed.unwrap(), [Verdict::Applied; 2]);
    assert_eq!(ended.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn upkeep_waits_for_no_queue() {
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
    // 64 MiB in all, which takes many transactions.
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
async fn a_renewal_never_cuts_short_what_was_confirmed() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    let lease = reserved(&store, "k").await;
    let raw = raw(&folder.file());
    // As after a renewal by a process whose clock was an hour ahead.
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
async fn renewals_without_number_are_answered_one_by_one() {
    const LEASES: usize = 10_000;
    let folder = Folder::new();
    let store = SqliteStore::options().queue_capacity(100).open(folder.file()).await.unwrap();
    let lease = reserved(&store, "k").await;
    // Every other lease has no record.
    let leases: Vec<_> = (0..LEASES)
        .map(|n| match n % 2 {
            0 => lease.clone(),
            _ => Lease { key: key(&format!("k{n}")), ..lease.clone() },
        })
        .collect();
    let answers = renew_all(&*store.upkeep(), &leases).await.unwrap();
    let expected = [Verdict::Applied, Verdict::Refused].into_iter().cycle().take(LEASES);
    assert!(answers.into_iter().eq(expected));
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

/// A file that a child closes late may have been written to by others since: the child must not tidy it up.
#[tokio::test]
async fn a_forked_child_takes_nothing_from_those_that_came_after() {
    let folder = Folder::new();
    fork(&folder, "late");
    let store = open(&folder.file()).await;
    for n in 0..10 {
        let record = store.inspect(&race::key(n)).await.unwrap().unwrap_or_else(|| panic!("{n} is lost"));
        assert!(record.record.is_finished(), "{n}");
    }
}

#[tokio::test]
async fn a_child_that_was_forked_in_the_middle_of_a_write_leaves_the_file_alone() {
    let folder = Folder::new();
    drop(open(&folder.file()).await);
    let holder = raw(&folder.file());
    holder.execute_batch("BEGIN IMMEDIATE").unwrap();
    fork(&folder, "busy");
    holder.execute_batch("COMMIT").unwrap();
}

#[tokio::test]
async fn a_cancelled_caller_takes_nobody_with_it() {
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
fn what_is_left_to_write_when_the_runtime_ends_is_written() {
    let folder = Folder::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (first, second) = (runtime(), runtime());
    let store = first.block_on(open(&folder.file()));
    let handler = {
        let store = store.clone();
        async move {
            let operation = Operation::new(&store, Key::new("test", "k"), POLICY);
            run(operation, record_values::<Json>(), std::future::pending::<Result<u32, Error>>()).await
        }
    };
    first.block_on(async {
        let running = tokio::spawn(handler);
        while store.inspect(&key("k")).await.unwrap().is_none() {
            tokio::task::yield_now().await;
        }
        assert!(!running.is_finished());
    });
    // Drops the handler, outside of any runtime.
    drop(first);
    second.block_on(store.flush());
    assert_eq!(second.block_on(store.inspect(&key("k"))).unwrap().unwrap().record.state, State::Released);
}

// Several handles and processes.

/// Once most reservations are replays, the reader handles them first.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn reservations_among_replays_are_decided_once() {
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
                    assert_eq!(run(operation, record_values::<Json>(), body).await.unwrap(), 0);
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
    let duplicate =
        observe(run(Operation::new(&waiting, Key::new("test", "k"), policy), record_values::<Json>(), body));
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
async fn a_store_that_is_dropped_lets_go_of_its_file() {
    let folder = Folder::new();
    let store = open(&folder.file()).await;
    reserved(&store, "k").await;
    let handle = store.handle();
    drop(store);
    assert!(handle.inspect(&key("k")).await.unwrap().is_some());
    assert!(folder.path().join("records.db-wal").exists());
    drop(handle);
    // The last connection removes the files.
    while folder.path().join("records.db-wal").exists() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs a process that is killed while it records, and returns how many results it was told are recorded.
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
async fn what_a_killed_process_was_told_is_recorded() {
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
        // The attempt that died is taken over once its lease has lapsed, and the other keys go on.
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
    assert!(killed > 0, "nobody was killed in the middle");
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
