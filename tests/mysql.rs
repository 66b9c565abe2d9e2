//! `MySqlStore` on real servers: its table, its costs, its errors, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use idem_runtime::mysql::MySqlOptions;
use idem_runtime::record::State;
use idem_runtime::store::{
    Filter, Finish, Lease, OwnerToken, Release, Reservation, ReserveRequest, Standing, Verdict, renew_all,
};
use idem_runtime::{Error, Key, MySqlStore, Operation, Store, StoreError, StoreErrorKind, current};
use idem_tests::calls::{
    LEASE, POLICY, TTL, call, done, is_of_a_later_format, key, lease_of, one_step, request, reserved, stored, wins,
    write_pinned_records,
};
use idem_tests::log::Log;
use idem_tests::mysql::{MySqlServer, is_mariadb, raw, shared, shared_table, write_nonsense};
use idem_tests::proxy::{Line, Proxy};
use idem_tests::server::until;
use idem_tests::statement_about_journals;
use idem_tests::tls::Certificate;
use mysql_async::Conn;
use mysql_async::prelude::Queryable;

const SCHEMA: &str = include_str!("../idem-runtime/src/stores/mysql/schema.sql");
/// The server's time, as the store writes it.
const NOW: &str = "timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6))";

fn options() -> MySqlOptions {
    MySqlStore::options().ensure_schema()
}

async fn connect(url: &str) -> MySqlStore {
    options().connect(url).await.unwrap()
}

/// Store on the shared server in its own table, a connection of the raw client, and the name of the table.
async fn open() -> (MySqlStore, Conn, String) {
    let (url, table) = shared_table();
    let store = options().table(&table).connect(&url).await.unwrap();
    (store, raw(&url).await, table)
}

fn kind<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> StoreErrorKind {
    answer.expect_err("fails").kind()
}

/// Value of a status variable of the server.
async fn status(raw: &mut Conn, name: &str) -> u64 {
    let (_, value): (String, String) =
        raw.query_first(format!("SHOW GLOBAL STATUS LIKE '{name}'")).await.unwrap().expect("a variable");
    value.parse().unwrap()
}

// The table.

#[tokio::test]
async fn the_schema_file_creates_the_same_table_as_connect() {
    let server = MySqlServer::start();
    let mut raw = server.raw().await;
    assert_eq!(MySqlStore::schema_sql("idem_records"), SCHEMA);
    let mut tables = Vec::new();
    for by_file in [true, false] {
        raw.query_drop("DROP TABLE IF EXISTS idem_records").await.unwrap();
        if by_file {
            raw.query_drop(SCHEMA).await.unwrap();
            raw.query_drop(SCHEMA).await.expect("may be run again");
            MySqlStore::connect(&server.url()).await.expect("needs no right to create a table");
        } else {
            connect(&server.url()).await;
        }
        let (_, table): (String, String) =
            raw.query_first("SHOW CREATE TABLE idem_records").await.unwrap().expect("a table");
        tables.push(table);
    }
    assert_eq!(tables[0], tables[1]);
    assert!(tables[0].contains("`key` varbinary(1024) NOT NULL"), "{}", tables[0]);
}

#[tokio::test]
async fn many_processes_create_the_table_concurrently() {
    let (url, table) = shared_table();
    let opened = join_all((0..20).map(async |_| options().table(&table).connect(&url).await)).await;
    for (n, store) in opened.into_iter().enumerate() {
        reserved(&store.unwrap(), &format!("k{n}")).await;
    }
}

#[tokio::test]
async fn a_missing_or_foreign_table_is_refused() {
    let (url, table) = shared_table();
    let error = MySqlStore::options().table(&table).connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    assert!(error.to_string().contains("ensure_schema"), "{error}");
    let mut raw = raw(&url).await;
    for (ddl, words) in [
        (format!("CREATE TABLE {table} (id int)"), "not of this library"),
        (SCHEMA.replace("idem_records", &table).replace("'idem 1'", "'idem 12'"), "another version"),
        (SCHEMA.replace("idem_records", &table).replace("InnoDB ROW_FORMAT = DYNAMIC", "MyISAM"), "InnoDB is needed"),
    ] {
        if words.contains("InnoDB") && !is_mariadb() {
            // MySQL's MyISAM can't hold keys of this length.
            continue;
        }
        raw.query_drop("SET SESSION sql_mode = ''").await.unwrap();
        if raw.query_drop(&ddl).await.is_err() && words.contains("InnoDB") {
            continue;
        }
        for options in [MySqlStore::options(), options()] {
            let error = options.table(&table).connect(&url).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
            assert!(error.to_string().contains(words), "{error}");
        }
        raw.query_drop(format!("DROP TABLE {table}")).await.unwrap();
    }
    // An administrator may add text to the comment.
    raw.query_drop(SCHEMA.replace("idem_records", &table).replace("'idem 1'", "'idem 1, of the shop'")).await.unwrap();
    MySqlStore::options().table(&table).connect(&url).await.unwrap();
    for name in ["", "a`b", "a.b", "a-b", &"x".repeat(65)] {
        assert_eq!(kind(options().table(name).connect(&url).await), StoreErrorKind::Misconfigured, "{name}");
    }
}

#[tokio::test]
async fn the_stored_form_is_pinned() {
    let (store, mut raw, table) = open().await;
    write_pinned_records(&store).await;

    // The rows are compared as statements that insert them, with times that differ by their retention.
    let columns = "`key`, format, state, owner, attempt, attempts_used, fingerprint, on_crash_fail, begun, lease_ms, ttl_ms, \
                   holder, traceparent, decided_by, decided_reason, codec, result_bytes, result";
    let quoted: Vec<_> = columns
        .split(", ")
        .map(|column| match column {
            "`key`" | "state" | "holder" | "traceparent" | "decided_by" | "decided_reason" | "codec" => {
                format!("coalesce(concat('''', {column}, ''''), 'NULL')")
            }
            "owner" | "fingerprint" | "result" => format!("coalesce(concat('x''', hex({column}), ''''), 'NULL')"),
            column => format!("coalesce({column}, 'NULL')"),
        })
        .collect();
    let rows = format!(
        "SELECT concat_ws(', ', {}, (expires_at - lapses_at) DIV 1000000) FROM {table} ORDER BY `key`",
        quoted.join(", ")
    );
    let rows: Vec<Vec<u8>> = raw.query(rows).await.unwrap();
    let written: String = rows.iter().fold(String::new(), |all, row| all + &String::from_utf8_lossy(row) + "\n");
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/mysql-v1.txt");
        std::fs::write(path, &written).unwrap();
    }
    let golden = include_str!("golden/mysql-v1.txt");
    assert_eq!(written, golden, "a released format never changes: give a new format a new version");

    // A store reads the pinned rows from another table.
    let (reader, mut raw, table) = open().await;
    for line in golden.lines() {
        let (values, retained) = line.rsplit_once(", ").expect("a retention");
        let insert = format!(
            "INSERT INTO {table} ({columns}, lapses_at, expires_at, listed_at, first_seen_at, began_at) \
             VALUES ({values}, {NOW} + 1000000000, {NOW} + ({retained} + 1000) * 1000000, {NOW}, {NOW}, {NOW})"
        );
        raw.query_drop(insert).await.unwrap();
        let name = line.split("test/").nth(1).and_then(|rest| rest.split('\'').next()).unwrap();
        let (read, wrote) = (reader.inspect(&key(name)).await.unwrap(), store.inspect(&key(name)).await.unwrap());
        assert_eq!(read.unwrap().record, wrote.unwrap().record, "{name}");
    }
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let (store, mut raw, table) = open().await;
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let bytes = one_step().bytes().len();
    // The runbook has this statement for the tables of three stores.
    let counted: Vec<(String, usize, usize, usize)> = raw.query(statement_about_journals(&table)).await.unwrap();
    assert_eq!(counted, [("pending".to_owned(), 1, bytes, bytes)]);
    raw.query_drop(format!("UPDATE {table} SET format = 2")).await.unwrap();
    let mut text = async || -> String {
        let rows: Vec<mysql_async::Row> = raw.query(format!("SELECT * FROM {table}")).await.unwrap();
        format!("{rows:?}")
    };
    let before = text().await;
    is_of_a_later_format(&store, "k").await;
    assert_eq!(text().await, before);
}

#[tokio::test]
async fn damaged_rows_and_rows_of_a_later_version_are_left_unchanged() {
    let (url, table) = shared_table();
    let store = options().table(&table).connect(&url).await.unwrap();
    let mut raw = raw(&url).await;
    write_nonsense(&url, &table, "1/test/later").await;
    for (name, change) in [
        ("state", "state = 'X'"),
        ("owner", "owner = 'short'"),
        ("attempt", "attempt = 4294967296"),
        ("attempts_used", "attempts_used = 2"),
        ("lease", "lease_ms = NULL"),
        ("ttl", "ttl_ms = -1"),
        ("codec", "codec = 'json', result = 'x'"),
        ("holder", "holder = x'ff'"),
    ] {
        reserved(&store, name).await;
        raw.query_drop(format!("UPDATE {table} SET {change} WHERE `key` = '1/test/{name}'")).await.unwrap();
    }
    let names = ["state", "owner", "attempt", "attempts_used", "lease", "ttl", "codec", "holder"];
    let mut text = async || -> String {
        let rows: Vec<mysql_async::Row> = raw.query(format!("SELECT * FROM {table} ORDER BY `key`")).await.unwrap();
        format!("{rows:?}")
    };
    let before = text().await;
    for name in names.iter().chain(&["later"]) {
        let error = store.reserve(&request(&store, name)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{name}: {error}");
        let found = store.inspect(&key(name)).await.unwrap().unwrap();
        assert_eq!(found.standing(), Standing::Damaged, "{name}");
    }
    assert_eq!(text().await, before);
    // Expired rows of a later version are left unchanged, too.
    raw.query_drop(format!("UPDATE {table} SET expires_at = {NOW}, listed_at = {NOW} WHERE format = 99"))
        .await
        .unwrap();
    assert_eq!(kind(store.reserve(&request(&store, "later")).await), StoreErrorKind::Corrupt);
    assert_eq!(store.purge(100).await.unwrap(), 0, "a record of a later version is not purged");
    idem_tests::forget_damaged(&store, &key("later"), "format 99").await;
    for name in names {
        idem_tests::forget_damaged(&store, &key(name), "damaged").await;
    }
}

// Costs in statements.

/// Counter of the statements that the server has run since the last count.
struct Counter {
    raw: Conn,
    seen: u64,
}

impl Counter {
    async fn new(server: &MySqlServer) -> Self {
        let mut counter = Self { raw: server.raw().await, seen: 0 };
        counter.count().await;
        counter
    }

    async fn count(&mut self) -> u64 {
        let all = status(&mut self.raw, "Com_stmt_execute").await;
        let new = all - self.seen;
        self.seen = all;
        new
    }
}

#[tokio::test]
async fn a_first_run_takes_two_statements_and_every_other_call_takes_one() {
    let server = MySqlServer::start();
    let (owner, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let runs = AtomicU32::new(0);
    let mut counter = Counter::new(&server).await;
    for n in 0..5 {
        call(&owner, &format!("k{n}"), &runs).await.0.unwrap();
        assert_eq!(counter.count().await, 2, "a first run");
    }
    for n in 0..20 {
        assert!(call(&other, &format!("k{}", n % 5), &runs).await.1.replayed());
        let statements = counter.count().await;
        // MySQL's insert returns no row, so the first replays take a second statement.
        assert!(statements == 1 || (!is_mariadb() && n < 8), "a replay in {statements}");
    }
    let busy = reserved(&owner, "busy").await;
    counter.count().await;
    assert!(matches!(call(&other, "busy", &runs).await.0, Err(Error::InProgress { .. })));
    assert_eq!(counter.count().await, 1, "in progress");
    assert_eq!(renew_all(&owner, std::slice::from_ref(&busy)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(counter.count().await, 1, "a beat");
    assert_eq!(owner.release(&busy, Release::Returned).await.unwrap(), Verdict::Applied);
    assert_eq!(counter.count().await, 1, "a release");
}

#[tokio::test]
async fn concurrent_operations_share_statements() {
    let server = MySqlServer::start();
    let store = connect(&server.url()).await;
    let runs = AtomicU32::new(0);
    let mut counter = Counter::new(&server).await;
    let names: Vec<_> = (0..500).map(|n| format!("k{n}")).collect();
    for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
        calls.0.unwrap();
    }
    let first = counter.count().await;
    assert!(first < 120, "500 first runs in {first} statements");
    for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
        assert!(calls.1.replayed());
    }
    let replays = counter.count().await;
    assert!(replays < 60, "500 replays in {replays} statements");
    let leases = join_all((0..1280).map(|n| {
        let store = store.clone();
        async move { reserved(&store, &format!("lease{n}")).await }
    }))
    .await;
    counter.count().await;
    assert!(renew_all(&store, &leases).await.unwrap().iter().all(|answer| *answer == Verdict::Applied));
    assert_eq!(counter.count().await, 10, "128 leases a statement");
}

/// Runs a handler that has three steps and returns its own number.
async fn in_three_steps(store: &MySqlStore, number: u32) -> Result<u32, Error> {
    let key = Ok::<_, idem_runtime::key::KeyError>(key(&format!("steps{number}")));
    let body = async {
        for name in ["charge", "reserve", "book"] {
            let value = current()?.step(name).run(async |_| Ok::<_, Error>(number)).await?;
            assert_eq!(value, number);
        }
        Ok(number)
    };
    Operation::new(store, key, POLICY).run(body).await
}

#[tokio::test]
async fn concurrent_handlers_share_the_statements_of_their_steps() {
    let server = MySqlServer::start();
    let store = connect(&server.url()).await;
    let mut counter = Counter::new(&server).await;
    assert_eq!(in_three_steps(&store, 0).await.unwrap(), 0);
    assert_eq!(counter.count().await, 5, "a lone handler: the reservation, three steps and the result");
    let handlers = join_all((1..201).map(|n| in_three_steps(&store, n))).await;
    assert_eq!(handlers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), (1..201).collect::<Vec<_>>());
    let statements = counter.count().await;
    assert!(statements < 150, "200 handlers with three steps in {statements} statements");
}

#[tokio::test]
async fn waiting_duplicates_of_many_keys_share_one_poll() {
    let server = MySqlServer::start();
    let (owner, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let leases = join_all((0..40).map(|n| {
        let owner = owner.clone();
        async move { reserved(&owner, &format!("k{n}")).await }
    }))
    .await;
    let mut counter = Counter::new(&server).await;
    let time = Duration::from_millis(500);
    let waits = join_all(leases.iter().map(|lease| other.wait(&lease.key, 1, time))).await;
    assert!(waits.iter().all(|found| found.as_ref().unwrap().as_ref().unwrap().record.is_pending()));
    let statements = counter.count().await;
    // Each waiter reads its record at the end. Without a shared poll there would be 40 polls every 50 ms.
    assert!(statements <= 40 + 15, "{statements} statements");
    // A record that another process ends wakes its waiter at the next poll.
    let ended = async {
        assert_eq!(owner.finish(&leases[7], &done()).await.unwrap(), Verdict::Applied);
    };
    let (found, ()) = tokio::join!(other.wait(&leases[7].key, 1, Duration::from_secs(60)), ended);
    assert!(matches!(found.unwrap().unwrap().record.state, State::Completed(_)));
}

#[tokio::test]
async fn a_replay_waits_for_no_lock_and_writes_nothing() {
    let (store, mut raw, table) = open().await;
    let runs = AtomicU32::new(0);
    call(&store, "k", &runs).await.0.unwrap();
    raw.query_drop("BEGIN").await.unwrap();
    raw.query_drop(format!("SELECT 1 FROM {table} WHERE `key` = '1/test/k' FOR UPDATE")).await.unwrap();
    for _ in 0..12 {
        // The first replays are inserts, which wait for the lock in vain and then read.
        assert!(call(&store, "k", &runs).await.1.replayed());
    }
    let started = std::time::Instant::now();
    assert!(call(&store, "k", &runs).await.1.replayed());
    assert!(started.elapsed() < Duration::from_millis(900), "no lock wait once replays are expected");
    raw.query_drop("ROLLBACK").await.unwrap();
}

// Purging.

#[tokio::test]
async fn a_purge_deletes_only_expired_records_and_waits_for_no_lock() {
    let (store, mut raw, table) = open().await;
    for n in 0..300 {
        let lease = reserved(&store, &format!("k{n:03}")).await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    }
    let live = reserved(&store, "live").await;
    raw.query_drop(format!(
        "UPDATE {table} SET expires_at = {NOW} - 1, listed_at = {NOW} - 1 WHERE `key` < '1/test/k200'"
    ))
    .await
    .unwrap();
    // A record that was renewed since it was listed.
    raw.query_drop(format!("UPDATE {table} SET listed_at = {NOW} - 1 WHERE `key` = '1/test/live'")).await.unwrap();
    raw.query_drop("BEGIN").await.unwrap();
    raw.query_drop(format!("SELECT 1 FROM {table} WHERE `key` = '1/test/k100' FOR UPDATE")).await.unwrap();
    let started = std::time::Instant::now();
    let mut gone = 0;
    for _ in 0..5 {
        gone += store.purge(50).await.unwrap();
    }
    assert_eq!(gone, 199, "all but the locked record");
    assert!(started.elapsed() < Duration::from_millis(900), "a purge waits for no lock");
    raw.query_drop("COMMIT").await.unwrap();
    assert_eq!(store.purge(50).await.unwrap(), 1);
    assert_eq!(store.purge(50).await.unwrap(), 0);
    let left: u64 = raw.query_first(format!("SELECT count(*) FROM {table}")).await.unwrap().unwrap();
    assert_eq!(left, 101);
    assert_eq!(store.finish(&live, &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn the_background_purge_works_until_its_store_is_dropped() {
    let (url, table) = shared_table();
    let store = options().table(&table).purge_every(Duration::from_millis(10)).connect(&url).await.unwrap();
    let mut raw = raw(&url).await;
    let expire = format!("UPDATE {table} SET expires_at = {NOW} - 1, listed_at = {NOW} - 1");
    for n in 0..3 {
        let lease = reserved(&store, &format!("k{n}")).await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
        raw.query_drop(&expire).await.unwrap();
        until("the record is purged", async || {
            raw.query_first::<u64, _>(format!("SELECT count(*) FROM {table}")).await.unwrap() == Some(0)
        })
        .await;
    }
}

// Settings and rights.

#[tokio::test]
async fn results_larger_than_a_packet_are_refused_before_the_write() {
    let server = MySqlServer::start_with(&["--max-allowed-packet=1M"]);
    let store = connect(&server.url()).await;
    let lease = reserved(&store, "k").await;
    let mut counter = Counter::new(&server).await;
    let large = Finish::Completed(stored(vec![b'x'; 1024 * 1024]));
    assert_eq!(kind(store.finish(&lease, &large).await), StoreErrorKind::TooLarge);
    assert_eq!(counter.count().await, 0, "the server was not asked");
    let fits = Finish::Completed(stored(vec![b'x'; 1024 * 1024 - 17 * 1024]));
    assert_eq!(store.finish(&lease, &fits).await.unwrap(), Verdict::Applied);
    let found = store.inspect(&lease.key).await.unwrap().unwrap();
    assert_eq!(found.record.state.result().unwrap().stored_bytes(), 1024 * 1024 - 17 * 1024);
}

#[tokio::test]
async fn urls_that_can_not_be_used_are_refused_without_showing_the_password() {
    let port = shared();
    for url in [
        "postgres://root:secret@localhost/idem".to_owned(),
        "mysql://root:secret@:::/idem".to_owned(),
        format!("mysql://root:secret@127.0.0.1:{port}"),
        format!("mysql://root:secret@127.0.0.1:{port}/"),
        format!("mysql://root:secret@127.0.0.1:{port}/idem"),
        format!("mysql://nobody:secret@127.0.0.1:{port}/idem"),
        format!("mysql://root@127.0.0.1:{port}/missing"),
        format!("mysql://root@127.0.0.1:{port}/idem?secret=1"),
    ] {
        let error = MySqlStore::connect(&url).await.expect_err(&url);
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        assert!(!error.to_string().contains("secret"), "{error}");
    }
    let error = MySqlStore::connect("mysql://root@127.0.0.1:1/idem").await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn connect_and_ping_name_a_right_that_is_missing() {
    let server = MySqlServer::start();
    connect(&server.url()).await;
    let mut raw = server.raw().await;
    raw.query_drop("CREATE USER worker@'%' IDENTIFIED BY 'pw'").await.unwrap();
    let url = format!("mysql://worker:pw@127.0.0.1:{}/idem", server.port());
    for (granted, missing) in [("SELECT", "INSERT"), ("INSERT", "UPDATE")] {
        raw.query_drop(format!("GRANT {granted} ON idem.idem_records TO worker@'%'")).await.unwrap();
        let error = MySqlStore::connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains(missing), "{error}");
    }
    raw.query_drop("GRANT UPDATE ON idem.idem_records TO worker@'%'").await.unwrap();
    let store = MySqlStore::connect(&url).await.expect("calls delete no rows");
    let purging = MySqlStore::options().purge_every(Duration::from_secs(60)).connect(&url).await;
    assert!(purging.unwrap_err().to_string().contains("DELETE"));
    store.ping().await.unwrap();
    let runs = AtomicU32::new(0);
    call(&store, "k", &runs).await.0.unwrap();
    raw.query_drop("REVOKE UPDATE ON idem.idem_records FROM worker@'%'").await.unwrap();
    // A session notices a change of its rights to a table immediately, but not of its rights to a database.
    let error = store.ping().await.unwrap_err();
    assert!(error.to_string().contains("UPDATE"), "{error}");
    raw.query_drop("GRANT UPDATE ON idem.idem_records TO worker@'%'").await.unwrap();
    raw.query_drop("ALTER TABLE idem.idem_records DROP COLUMN decided_by").await.unwrap();
    assert_eq!(kind(store.ping().await), StoreErrorKind::Misconfigured);
}

#[tokio::test]
async fn a_server_that_only_reads_is_refused_until_it_writes() {
    let server = MySqlServer::start();
    let store = connect(&server.url()).await;
    let mut raw = server.raw().await;
    reserved(&store, "k").await;
    raw.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    let error = store.ping().await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    let error = MySqlStore::connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    let reader = MySqlStore::options().read_only().connect(&server.url()).await.unwrap();
    assert!(reader.inspect(&key("k")).await.unwrap().is_some());
    raw.query_drop("SET GLOBAL read_only = 0").await.unwrap();
    store.ping().await.unwrap();
}

#[tokio::test]
async fn a_server_that_logs_statements_is_refused() {
    let server = MySqlServer::start_with(&["--log-bin=log", "--server-id=1", "--binlog-format=STATEMENT"]);
    let error = options().connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("binlog_format"), "{error}");
    let server = MySqlServer::start_with(&["--log-bin=log", "--server-id=1", "--binlog-format=ROW"]);
    let store = connect(&server.url()).await;
    let runs = AtomicU32::new(0);
    let names: Vec<_> = (0..50).map(|n| format!("k{n}")).collect();
    for (result, _) in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
        result.unwrap();
    }
}

#[tokio::test]
async fn a_server_with_a_source_is_refused_if_the_login_may_ask() {
    let server = MySqlServer::start_with(&["--server-id=2"]);
    let (store, mut raw) = (connect(&server.url()).await, server.raw().await);
    let change = if is_mariadb() {
        "CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = 1"
    } else {
        "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_PORT = 1"
    };
    raw.query_drop(change).await.unwrap();
    let error = MySqlStore::connect(&server.url()).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
    assert!(error.to_string().contains("replica"), "{error}");
    MySqlStore::options().read_only().connect(&server.url()).await.expect("a replica can be read");
    store.ping().await.expect("a store that is open is not refused");
    // A login without the right to ask is not refused.
    raw.query_drop("CREATE USER worker@'%' IDENTIFIED BY 'pw'").await.unwrap();
    raw.query_drop("GRANT SELECT, INSERT, UPDATE ON idem.* TO worker@'%'").await.unwrap();
    MySqlStore::connect(&format!("mysql://worker:pw@127.0.0.1:{}/idem", server.port())).await.unwrap();
}

#[tokio::test]
async fn settings_with_which_a_crash_loses_records_are_logged() {
    for (args, words) in [
        (&["--innodb-flush-log-at-trx-commit=1", "--skip-log-bin"][..], None),
        (&["--log-bin=log", "--server-id=1", "--binlog-format=ROW", "--sync-binlog=1"], None),
        (&["--log-bin=log", "--server-id=1", "--binlog-format=ROW", "--sync-binlog=0"], Some("sync_binlog")),
        (&["--innodb-flush-log-at-trx-commit=2"], Some("innodb_flush_log_at_trx_commit")),
    ] {
        let server = MySqlServer::start_with(args);
        let log = Log::start();
        connect(&server.url()).await;
        let log = log.end();
        match words {
            None => assert!(!log.contains("forgets"), "{args:?}: {log}"),
            Some(words) => assert!(log.contains("forgets") && log.contains(words), "{args:?}: {log}"),
        }
    }
}

/// The server takes only encrypted connections. Its certificate is trusted only by a process whose environment names
/// the certificate.
#[test]
fn a_store_refuses_a_server_with_an_untrusted_certificate() {
    let certificate = Certificate::new();
    let files = [("cert", certificate.file()), ("key", certificate.key())];
    let args = files.map(|(name, file)| format!("--ssl-{name}={file}"));
    let server = MySqlServer::start_with(&args.each_ref().map(|arg| &**arg));
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        connect(&server.url()).await;
        server.raw().await.query_drop("SET GLOBAL require_secure_transport = 1").await.unwrap();
    });
    let race = |host: &str, options: &str, trusted: bool| {
        let url = format!("mysql://root@{host}:{}/idem{options}", server.port());
        let spec = format!("mysql {url} idem_records");
        certificate.race(env!("CARGO_BIN_EXE_racer"), spec, server.folder(), trusted)
    };
    for (host, options, trusted, says) in [
        ("localhost", "?require_ssl=true", false, "invalid peer certificate: "),
        ("127.0.0.1", "?require_ssl=true", true, "not valid for name"),
        ("localhost", "", true, "require_ssl=true"),
    ] {
        let refused = race(host, options, trusted);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && said.contains(says) && said.contains("Misconfigured"), "{said}");
    }
    for options in ["?require_ssl=true", "?require_ssl=true&verify_identity=false"] {
        let trusting = race("localhost", options, true);
        assert!(trusting.status.success(), "{}", String::from_utf8_lossy(&trusting.stderr));
    }
}

#[tokio::test]
async fn a_server_without_encryption_is_refused_if_the_url_wants_it() {
    // A server of MySQL makes a certificate itself, which no process trusts.
    let url = format!("{}?require_ssl=true", shared_table().0);
    let error = MySqlStore::connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn a_store_that_only_reads_needs_no_right_to_write() {
    let server = MySqlServer::start();
    let (store, mut raw) = (connect(&server.url()).await, server.raw().await);
    reserved(&store, "k").await;
    raw.query_drop("CREATE USER reader@'%' IDENTIFIED BY 'pw'").await.unwrap();
    raw.query_drop("GRANT SELECT ON idem.idem_records TO reader@'%'").await.unwrap();
    raw.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    let url = format!("mysql://reader:pw@127.0.0.1:{}/idem", server.port());
    let reader = MySqlStore::options().read_only().connect(&url).await.unwrap();
    reader.ping().await.unwrap();
    assert!(reader.inspect(&key("k")).await.unwrap().is_some());
    raw.query_drop("REVOKE SELECT ON idem.idem_records FROM reader@'%'").await.unwrap();
    assert_eq!(kind(reader.ping().await), StoreErrorKind::Misconfigured);
}

/// Runs a record through all writes, and many records concurrently.
async fn runs_everything(store: &MySqlStore, name: &str) {
    let lease = reserved(store, name).await;
    assert_eq!(store.begin(&lease).await.unwrap(), Verdict::Applied);
    assert_eq!(renew_all(store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    let runs = AtomicU32::new(0);
    for round in 0..2 {
        let names: Vec<_> = (0..40).map(|n| format!("{name}:{n}")).collect();
        for (answer, outcome) in join_all(names.iter().map(|name| call(store, name, &runs))).await {
            answer.unwrap();
            assert_eq!(outcome.replayed(), round > 0);
        }
    }
    for answer in join_all((1..21).map(|n| in_three_steps(store, n))).await {
        answer.unwrap();
    }
    assert_eq!(runs.into_inner(), 40);
}

#[tokio::test]
async fn a_server_that_prepares_no_statement_serves_all_calls() {
    let server = MySqlServer::start();
    server.raw().await.query_drop("SET GLOBAL max_prepared_stmt_count = 0").await.unwrap();
    let store = connect(&server.url()).await;
    runs_everything(&store, "k").await;
    assert_eq!(store.list(&Filter::default().scan().scope("test")).await.unwrap().records.len(), 61);
}

#[tokio::test]
async fn a_server_without_room_for_temporary_tables_serves_all_calls() {
    let server = MySqlServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]);
    let mut raw = server.raw().await;
    let store = connect(&server.url()).await;
    let leases = join_all((0..200).map(async |n| reserved(&store, &format!("before{n}")).await)).await;
    assert_eq!(store.release(&leases[7], Release::Returned).await.unwrap(), Verdict::Applied);
    drop(store);
    if is_mariadb() {
        raw.query_drop("SET GLOBAL tmp_disk_table_size = 1024").await.unwrap();
    } else {
        raw.query_drop("SET GLOBAL temptable_max_mmap = 0").await.unwrap();
        raw.query_drop("SET GLOBAL tmp_table_size = 1024").await.unwrap();
    }
    let store = connect(&server.url()).await;
    for store in [store.handle(), store.upkeep()] {
        let (said, renewed) = answers(&*store, &leases).await;
        renewed.unwrap();
        for (n, said) in said.into_iter().enumerate() {
            assert_eq!(said, Some(if n == 7 { Verdict::Refused } else { Verdict::Applied }), "{n}");
        }
    }
    runs_everything(&store, "k").await;
}

#[tokio::test]
async fn defaults_of_sessions_neither_lose_leases_nor_stop_writes() {
    let server = MySqlServer::start();
    let (mut raw, mut holder) = (server.raw().await, server.raw().await);
    MySqlStore::options().ensure_schema().connect(&server.url()).await.unwrap();
    raw.query_drop("SET GLOBAL sql_select_limit = 1").await.unwrap();
    let read_only = if is_mariadb() { "tx_read_only" } else { "transaction_read_only" };
    raw.query_drop(format!("SET GLOBAL {read_only} = 1")).await.unwrap();
    raw.query_drop("SET GLOBAL sql_safe_updates = 1").await.unwrap();
    raw.query_drop("SET GLOBAL max_join_size = 1").await.unwrap();
    if is_mariadb() {
        raw.query_drop("SET GLOBAL max_statement_time = 0.000001").await.unwrap();
    }
    let store = connect(&server.url()).await;
    let leases = join_all((0..6).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
    holder.query_drop("BEGIN").await.unwrap();
    for name in ["k2", "k4"] {
        let lock = format!("SELECT 1 FROM idem_records WHERE `key` = '1/test/{name}' FOR UPDATE");
        holder.query_drop(lock).await.unwrap();
    }
    let (said, _) = answers(&store, &leases).await;
    let expected: Vec<_> = (0..6).map(|n| (n != 2 && n != 4).then_some(Verdict::Applied)).collect();
    assert_eq!(said, expected, "no held lease is refused");
    holder.query_drop("COMMIT").await.unwrap();
    runs_everything(&store, "all").await;
}

#[tokio::test]
async fn large_values_are_written_alone_by_every_handle() {
    let server = MySqlServer::start_with(&["--innodb-flush-log-at-trx-commit=2"]);
    let store = options().pool_size(1).connect(&server.url()).await.unwrap();
    let mut counter = Counter::new(&server).await;
    for (of, store) in [store.handle(), store.upkeep()].into_iter().enumerate() {
        let leases = join_all((0..12).map(async |n| {
            let owner = store.context().new_owner();
            let asked = ReserveRequest::new(key(&format!("{of}:{n}")), owner, LEASE, TTL);
            lease_of(store.reserve(&asked).await)
        }))
        .await;
        counter.count().await;
        let ends = join_all(leases.iter().enumerate().map(|(n, lease)| {
            let result = Finish::Completed(stored(vec![b'x'; 65_000 + 200 * n]));
            let store = &store;
            async move { store.finish(lease, &result).await }
        }))
        .await;
        assert_eq!(counter.count().await, 12);
        for (n, end) in ends.into_iter().enumerate() {
            assert_eq!(end.unwrap(), Verdict::Applied);
            let found = store.inspect(&leases[n].key).await.unwrap().expect("a record");
            assert_eq!(found.record.state.result().unwrap().stored_bytes(), 65_000 + 200 * n);
        }
    }
}

#[tokio::test]
async fn settings_of_the_server_change_neither_times_nor_keys() {
    let server = MySqlServer::start_with(&[
        "--default-time-zone=+09:30",
        "--transaction-isolation=SERIALIZABLE",
        "--sql-mode=ANSI,NO_BACKSLASH_ESCAPES",
        "--character-set-server=latin1",
    ]);
    let store = connect(&server.url()).await;
    let lease = reserved(&store, "Grüße, \\ ' \" `").await;
    let found = store.inspect(&lease.key).await.unwrap().unwrap();
    assert!(found.lapses_in.unwrap() <= LEASE && found.lapses_in.unwrap() > LEASE / 2, "{:?}", found.lapses_in);
    for (name, other) in [("key", "KEY"), ("blank", "blank "), ("a", "ä"), ("ss", "ß")] {
        reserved(&store, name).await;
        reserved(&store, other).await;
    }
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

// Locks.

/// Locks the row of `name` until the returned connection ends its transaction.
async fn lock_row(url: &str, table: &str, name: &str) -> Conn {
    let mut conn = raw(url).await;
    conn.query_drop("BEGIN").await.unwrap();
    conn.query_drop(format!("SELECT 1 FROM {table} WHERE `key` = '1/test/{name}' FOR UPDATE")).await.unwrap();
    conn
}

/// Returns a statement that makes the record of `name`, which is pending.
fn insert(name: &str, owner: &str) -> String {
    format!(
        "INSERT INTO idem_records (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, \
         lapses_at, expires_at, listed_at, first_seen_at, began_at) VALUES ('1/test/{name}', '{owner}', 1, 'pending', 1, 1, \
         0, 60000, 3600000, {NOW} + 60000000, {NOW} + 3660000000, {NOW} + 3600000000, {NOW}, {NOW})"
    )
}

/// Renews `leases`. Returns the answer for each lease (`None` if the store gave no answer) and the result of the call.
async fn answers(store: &dyn Store, leases: &[Lease]) -> (Vec<Option<Verdict>>, Result<(), StoreError>) {
    let answers = Mutex::new(vec![None; leases.len()]);
    let renewed = store.renew(leases, &|at, write| answers.lock().unwrap()[at] = Some(write)).await;
    (answers.into_inner().unwrap(), renewed)
}

#[tokio::test]
async fn a_locked_record_costs_no_other_lease() {
    for partitions in [0, 4] {
        let (url, table) = shared_table();
        let store = options().table(&table).partitions(partitions).connect(&url).await.unwrap();
        let leases = join_all((0..6).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
        let gone = reserved(&store, "gone").await;
        assert_eq!(store.release(&gone, Release::Returned).await.unwrap(), Verdict::Applied);
        let leases: Vec<Lease> = leases.into_iter().chain([gone]).collect();
        let mut holder = lock_row(&url, &table, "k2").await;
        for store in [store.handle(), store.upkeep()] {
            let started = std::time::Instant::now();
            let (said, renewed) = answers(&*store, &leases).await;
            let expected: Vec<_> = (0..7)
                .map(|n| match n {
                    2 => None,
                    6 => Some(Verdict::Refused),
                    _ => Some(Verdict::Applied),
                })
                .collect();
            assert_eq!(said, expected, "the lease of a locked row is neither confirmed nor lost");
            assert_eq!(kind(renewed), StoreErrorKind::Unavailable);
            assert!(started.elapsed() < Duration::from_millis(900), "a renewal waits for no lock");
        }
        holder.query_drop("COMMIT").await.unwrap();
        let renewed = renew_all(&store, &leases[..6]).await.unwrap();
        assert!(renewed.iter().all(|write| *write == Verdict::Applied), "{renewed:?}");
    }
}

#[tokio::test]
async fn a_locked_record_fails_no_write_of_another_record() {
    let (url, table) = shared_table();
    let store = options().table(&table).connect(&url).await.unwrap();
    let leases = join_all((0..20).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
    let mut holder = lock_row(&url, &table, "k3").await;
    let ends = join_all(leases.iter().map(async |lease| (lease.key.clone(), store.finish(lease, &done()).await))).await;
    for (of, end) in ends {
        if of == key("k3") {
            assert_eq!(kind(end), StoreErrorKind::Unavailable, "nothing was written");
        } else {
            assert_eq!(end.unwrap(), Verdict::Applied, "{of}");
        }
    }
    holder.query_drop("COMMIT").await.unwrap();
    assert_eq!(store.finish(&leases[3], &done()).await.unwrap(), Verdict::Applied);
}

#[tokio::test]
async fn an_uncommitted_key_is_in_progress_and_fails_no_other_key() {
    let (url, table) = shared_table();
    let store = options().table(&table).connect(&url).await.unwrap();
    // A transaction of the user has reserved the key.
    let mut holder = raw(&url).await;
    holder.query_drop("BEGIN").await.unwrap();
    holder
        .query_drop(format!(
            "INSERT INTO {table} (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lapses_at, expires_at, \
             listed_at, first_seen_at, began_at) VALUES ('1/test/held', '0123456789abcdef', 1, 'released', 1, 1, 0, {NOW}, \
             {NOW} + 3600000000, {NOW} + 3600000000, {NOW}, {NOW})"
        ))
        .await
        .unwrap();
    let names: Vec<_> = (0..30).map(|n| if n == 11 { "held".to_owned() } else { format!("k{n}") }).collect();
    let answers = join_all(names.iter().map(async |name| (name, store.reserve(&request(&store, name)).await))).await;
    for (name, answer) in answers {
        let answer = answer.unwrap();
        match &**name {
            "held" => assert!(matches!(answer, Reservation::InProgress { attempt: 1, .. }), "{answer:?}"),
            _ => assert!(matches!(answer, Reservation::Granted { .. }), "{name}: {answer:?}"),
        }
    }
    holder.query_drop("COMMIT").await.unwrap();
    assert_eq!(reserved(&store, "held").await.attempt, 2);
}

#[tokio::test]
async fn statements_that_deadlock_are_repeated() {
    let (url, table) = shared_table();
    let store = Arc::new(options().table(&table).connect(&url).await.unwrap());
    let names: Vec<_> = (0..24).map(|n| format!("k{n:02}")).collect();
    // A session locks rows in the reverse order, again and again, while others run through all states.
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let rows: Vec<_> = names.iter().rev().cloned().collect();
    let adversary = tokio::spawn({
        let (url, table, stop) = (url.clone(), table.clone(), Arc::clone(&stop));
        async move {
            let mut conn = raw(&url).await;
            while !stop.load(Ordering::Relaxed) {
                conn.query_drop("BEGIN").await.unwrap();
                for name in &rows {
                    let lock = format!("SELECT 1 FROM {table} WHERE `key` = '1/test/{name}' FOR UPDATE");
                    if conn.query_drop(lock).await.is_err() {
                        break;
                    }
                }
                conn.query_drop("ROLLBACK").await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    });
    let runs = AtomicU32::new(0);
    for round in 0..20 {
        let calls = names.iter().map(async |name| {
            let name = format!("{name}-{round}");
            while call(&*store, &name, &runs).await.0.is_err() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        join_all(calls).await;
        let again = names.iter().map(|name| call(&*store, name, &runs));
        join_all(again).await;
    }
    stop.store(true, Ordering::Relaxed);
    adversary.await.unwrap();
    assert!(runs.into_inner() >= 480);
}

#[tokio::test]
async fn inserts_that_deadlock_are_repeated() {
    let server = MySqlServer::start();
    let stores = [connect(&server.url()).await, connect(&server.url()).await];
    let (mut raw, mut holder) = (server.raw().await, server.raw().await);
    for round in 0..5 {
        let name = format!("k{round}");
        holder.query_drop("BEGIN").await.unwrap();
        holder.query_drop(insert(&name, "0123456789abcdef")).await.unwrap();
        let reserves = join_all(stores.iter().map(async |store| store.reserve(&request(store, &name)).await));
        let ends = async {
            until("both inserts wait", async || {
                let waiting = "SELECT count(*) FROM information_schema.processlist WHERE command = 'Execute'";
                raw.query_first::<u64, _>(waiting).await.unwrap() == Some(2)
            })
            .await;
            holder.query_drop("ROLLBACK").await.unwrap();
        };
        let (answers, ()) = tokio::join!(reserves, ends);
        let granted = answers.iter().filter(|it| matches!(it, Ok(Reservation::Granted { .. }))).count();
        let refused = answers.iter().filter(|it| matches!(it, Ok(Reservation::InProgress { .. }))).count();
        assert_eq!((granted, refused), (1, 1), "{answers:?}");
    }
}

#[tokio::test]
async fn no_statement_waits_for_a_locked_table_after_its_caller_has_gone() {
    let (url, table) = shared_table();
    let store = options().table(&table).connect(&url).await.unwrap();
    let lease = reserved(&store, "before").await;
    let mut holder = raw(&url).await;
    holder.query_drop(format!("LOCK TABLES {table} READ")).await.unwrap();
    // An error would have to be `Unavailable`: nothing was written.
    match store.reserve(&request(&store, "k")).await {
        Ok(Reservation::InProgress { .. }) => {}
        other => assert_eq!(kind(other), StoreErrorKind::Unavailable),
    }
    assert_eq!(kind(store.finish(&lease, &done()).await), StoreErrorKind::Unavailable);
    let waiting = "SELECT count(*) FROM information_schema.processlist WHERE state LIKE '%metadata lock%'";
    assert_eq!(holder.query_first::<u64, _>(waiting).await.unwrap(), Some(0));
    holder.query_drop("UNLOCK TABLES").await.unwrap();
    assert!(store.inspect(&key("k")).await.unwrap().is_none());
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
}

// Faults.

#[tokio::test]
async fn a_repeated_reservation_is_not_in_progress_because_of_its_first_copy() {
    let (url, table) = shared_table();
    let proxy = Proxy::to(shared()).await;
    let options = options().table(&table).response_timeout(Duration::from_millis(1500));
    let store = options.connect(&url.replace(&shared().to_string(), &proxy.port().to_string())).await.unwrap();
    // The statement is prepared.
    reserved(&store, "warm").await;
    let asked = request(&store, "k").owner(OwnerToken::from_bytes(*b"fedcba9876543210"));
    proxy.set(Line::LoseRequests);
    assert_eq!(kind(store.reserve(&asked).await), StoreErrorKind::Unconfirmed);
    proxy.set(Line::Pass);
    // The first copy is in the server, and its commit takes long.
    let mut first = raw(&url).await;
    first.query_drop("BEGIN").await.unwrap();
    first.query_drop(insert("k", "fedcba9876543210").replace("idem_records", &table)).await.unwrap();
    let answer = store.reserve(&asked).await;
    assert_eq!(kind(answer), StoreErrorKind::Unconfirmed, "the engine repeats the request");
    let other = store.reserve(&request(&store, "k")).await.unwrap();
    assert!(matches!(other, Reservation::InProgress { .. }), "another request is told so: {other:?}");
    first.query_drop("COMMIT").await.unwrap();
    assert_eq!(wins(&store, &asked).await.attempt, 1);
}

#[tokio::test]
async fn one_call_meets_a_dead_route_and_not_each_idle_connection() {
    let (url, table) = shared_table();
    let proxy = Proxy::to(shared()).await;
    let options = options().table(&table).response_timeout(Duration::from_millis(1500));
    let store = options.connect(&url.replace(&shared().to_string(), &proxy.port().to_string())).await.unwrap();
    let mut raw = raw(&url).await;
    let lease = reserved(&store, "warm").await;
    // Operations on a locked record are sent alone, so that several connections are open at once.
    let mut holder = lock_row(&url, &table, "warm").await;
    let waits = join_all((0..4).map(async |_| store.finish(&lease, &done()).await));
    let inserts = join_all((0..4).map(async |n| store.reserve(&request(&store, &format!("k{n}"))).await));
    tokio::join!(waits, inserts);
    holder.query_drop("COMMIT").await.unwrap();
    let _ = raw.query_first::<u64, _>("SELECT 1").await.unwrap();
    let connections = proxy.sent().len();
    proxy.set(Line::Stale);
    // The first call finds the route dead, or on a slow machine tests its connection before and opens another.
    let _first = store.inspect(&lease.key).await;
    assert!(store.inspect(&lease.key).await.unwrap().is_some(), "the next one opens a new connection");
    assert!(proxy.sent().len() > connections, "the old connections are dead");
}

#[tokio::test]
async fn a_write_whose_answer_got_lost_is_recognised() {
    for line in [Line::LoseReplies, Line::ResetOnReply, Line::LoseRequests] {
        let (url, table) = shared_table();
        let proxy = Proxy::to(shared()).await;
        let options = options().table(&table).response_timeout(Duration::from_millis(1500));
        let store = options.connect(&url.replace(&shared().to_string(), &proxy.port().to_string())).await.unwrap();
        let warmed = AtomicU32::new(0);
        let warm = async || {
            let name = format!("warm{}", warmed.fetch_add(1, Ordering::Relaxed));
            let lease = wins(&store, &request(&store, &name)).await;
            assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
            lease.key
        };
        let warmed_key = warm().await;
        let lands = line != Line::LoseRequests;
        let direct = MySqlStore::options().table(&table).connect(&url).await.unwrap();
        // The line may also have broken an idle connection, whose next request gets an error and is repeated.
        let heals = async || {
            proxy.set(Line::Pass);
            while store.inspect(&warmed_key).await.is_err() {}
            warm().await;
        };
        let asked = request(&store, "k");
        proxy.set(line);
        assert_eq!(kind(store.reserve(&asked).await), StoreErrorKind::Unconfirmed, "{line:?}");
        assert_eq!(direct.inspect(&asked.key).await.unwrap().is_some(), lands, "{line:?}");
        heals().await;
        let lease = wins(&store, &asked).await;
        assert_eq!(lease.attempt, 1, "the repeated reservation is recognised");

        proxy.set(line);
        assert_eq!(kind(store.finish(&lease, &done()).await), StoreErrorKind::Unconfirmed, "{line:?}");
        assert_eq!(direct.inspect(&asked.key).await.unwrap().unwrap().record.is_finished(), lands, "{line:?}");
        heals().await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied, "{line:?}");

        proxy.set(line);
        assert_eq!(kind(store.inspect(&asked.key).await), StoreErrorKind::Unavailable, "a read can't land");
        proxy.set(Line::Pass);
    }
}

#[tokio::test]
async fn every_call_ends_if_the_server_does_not_answer() {
    let (url, table) = shared_table();
    let proxy = Proxy::to(shared()).await;
    let options = options().table(&table).response_timeout(Duration::from_millis(300));
    let store = options.connect(&url.replace(&shared().to_string(), &proxy.port().to_string())).await.unwrap();
    let runs = AtomicU32::new(0);
    call(&store, "warm", &runs).await.0.unwrap();
    proxy.set(Line::LoseRequests);
    let calls = join_all((0..100).map(|n| {
        let store = &store;
        async move { store.reserve(&request(store, &format!("k{n}"))).await }
    }))
    .await;
    assert!(calls.iter().all(|call| call.as_ref().is_err_and(StoreError::is_transient)), "{calls:?}");
    proxy.set(Line::Pass);
    // The store closes connections without an answer, and opens new ones.
    reserved(&store, "after").await;
}

#[tokio::test]
async fn a_store_replaces_sessions_that_the_server_ended() {
    let server = MySqlServer::start();
    let (store, mut raw) = (connect(&server.url()).await, server.raw().await);
    let runs = AtomicU32::new(0);
    for round in 0..10 {
        let names: Vec<_> = (0..20).map(|n| format!("k{round}:{n}")).collect();
        let calls = join_all(names.iter().map(async |name| {
            // The engine repeats requests that may be repeated. If a call still fails, its message is delivered again.
            while call(&store, name, &runs).await.0.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }));
        let ended = async {
            for _ in 0..3 {
                let others = "SELECT id FROM information_schema.processlist \
                              WHERE id <> connection_id() AND user = 'root'";
                let ids: Vec<u64> = raw.query(others).await.unwrap();
                for id in ids {
                    // The session may have ended meanwhile.
                    let _ = raw.query_drop(format!("KILL {id}")).await;
                }
            }
        };
        tokio::join!(calls, ended);
    }
    assert_eq!(runs.into_inner(), 200, "every body ran once");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_loses_no_acknowledged_record() {
    let mut server = MySqlServer::start();
    let store = options().response_timeout(Duration::from_secs(2)).connect(&server.url()).await.unwrap();
    let runs = AtomicU32::new(0);
    let mut finished: Vec<Key> = Vec::new();
    for round in 0..3 {
        let names: Vec<_> = (0..40).map(|n| format!("k{round}:{n}")).collect();
        let calls =
            join_all(names.iter().map(async |name| call(&store, name, &runs).await.0.is_ok().then(|| key(name))));
        let killed = async {
            tokio::time::sleep(Duration::from_millis(3)).await;
            tokio::task::block_in_place(|| {
                server.kill();
                server.run();
            });
        };
        let (calls, ()) = tokio::join!(calls, killed);
        finished.extend(calls.into_iter().flatten());
        until("the server answers", async || store.ping().await.is_ok()).await;
        for key in &finished {
            let found = store.inspect(key).await.unwrap().expect("an acknowledged record");
            assert!(found.record.is_finished(), "{key}");
        }
    }
}
