//! `PostgresStore` on real servers: its table, its costs, its errors, and faults.
#![allow(clippy::disallowed_methods, reason = "these tests wait for real servers")]
#![allow(clippy::format_collect, reason = "a handful of lines")]

use std::future::poll_fn;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::join_all;
use idem_runtime::codec::CodecName;
use idem_runtime::outbox::{OutgoingMessage, SendFuture, Sender};
use idem_runtime::postgres::PostgresOptions;
use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::{
    Decision, DecisionAnswer, Filter, Finish, HealthProblem, Journal, Lease, Release, Reservation, ReserveRequest,
    Standing, Verdict, renew_all,
};
use idem_runtime::{
    Error, InProgress, Json, Key, OnCrash, Operation, PostgresStore, Store, StoreError, StoreErrorKind, StoreExt,
    current, observe,
};
use idem_tests::Reopen as _;
use idem_tests::calls::{
    Confirming, LEASE, POLICY, call, done, is_of_a_later_format, one_step, publish, request, reserved, wins,
    write_pinned_records,
};
use idem_tests::natural;
use idem_tests::polls::poll_once;
use idem_tests::postgres::{PgBouncer, PostgresServer, quoted, raw, shared, shared_schema, write_nonsense};
use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::Race;
use idem_tests::statement_about_journals;
use idem_tests::tls::Certificate;
use tokio::runtime::{Builder, Runtime};
use tokio_postgres::{AsyncMessage, Client, NoTls};

const SCHEMA: &str = include_str!("../idem-runtime/src/stores/postgres/schema.sql");

fn options() -> PostgresOptions {
    PostgresStore::options().ensure_schema()
}

async fn connect(url: &str) -> PostgresStore {
    options().connect(url).await.unwrap()
}

/// Store on the shared server in its own schema, a connection of the raw client, and the name of the table.
async fn open() -> (PostgresStore, Client, String) {
    open_with(0).await
}

/// Does the same as [`open`], with a table that has `partitions` hash partitions.
async fn open_with(partitions: u16) -> (PostgresStore, Client, String) {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).partitions(partitions).connect(&url).await.unwrap();
    (store, raw(&url).await, format!("{}.records", quoted(&schema)))
}

async fn number(raw: &Client, query: &str) -> i64 {
    raw.query_one(query, &[]).await.unwrap().get(0)
}

/// Waits until the SQL `query` returns true.
async fn until(raw: &Client, query: &str) {
    while !raw.query_one(query, &[]).await.unwrap().get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn kind<T: std::fmt::Debug>(answer: Result<T, StoreError>) -> StoreErrorKind {
    answer.expect_err("fails").kind()
}

// Creation of the table.

#[tokio::test]
async fn the_schema_file_creates_the_same_table_as_connect() {
    assert_eq!(PostgresStore::schema_sql("idem"), SCHEMA);
    let server = PostgresServer::start();
    let (by_file, by_store) = (server.database("by_file").await, server.database("by_store").await);
    raw(&by_file).await.batch_execute(SCHEMA).await.unwrap();
    raw(&by_file).await.batch_execute(SCHEMA).await.expect("may be run again");
    connect(&by_store).await;
    let dump = |database| {
        let text = server.ask("pg_dump", &["--schema-only", database]);
        // Newer versions of `pg_dump` write a random word at the beginning and the end of their output.
        text.lines().filter(|line| !line.starts_with('\\')).map(|line| format!("{line}\n")).collect::<String>()
    };
    assert!(dump("by_file").contains("CREATE TABLE idem.records"));
    assert_eq!(dump("by_file"), dump("by_store"));
    let store = PostgresStore::connect(&by_file).await.expect("an existing table needs no right to create");
    reserved(&store, "k").await;
}

#[tokio::test]
async fn many_processes_create_the_table_concurrently() {
    let url = shared_schema().0;
    for round in 0..4 {
        let options = options().schema(format!("made at once {round}")).partitions(round % 2 * 4);
        let stores = join_all((0..16).map(|_| options.clone().pool_size(1).connect(&url))).await;
        for store in stores {
            store.unwrap();
        }
    }
}

/// Query for the parts of the table that do not depend on partitions: columns with comments, constraints and indexes.
const SHAPE: &str = "SELECT obj_description(c.oid, 'pg_class') || ': ' || (SELECT string_agg(concat_ws(' ', a.attname, \
     format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attcollation::regcollation, pg_get_expr(d.adbin, d.adrelid), \
     col_description(c.oid, a.attnum)), '; ' ORDER BY a.attnum) FROM pg_attribute a LEFT JOIN pg_attrdef d \
     ON d.adrelid = a.attrelid AND d.adnum = a.attnum WHERE a.attrelid = c.oid AND a.attnum > 0) || ' ' || \
     (SELECT string_agg(pg_get_constraintdef(k.oid), '; ' ORDER BY k.conname) FROM pg_constraint k WHERE k.conrelid = c.oid) \
     || ' ' || (SELECT string_agg(concat_ws(' ', i.indexrelid::regclass, i.indisvalid, i.indisunique, i.indkey), '; ' \
     ORDER BY i.indexrelid::regclass::text) FROM pg_index i WHERE i.indrelid = c.oid) \
     FROM pg_class c WHERE c.oid = 'idem.records'::regclass";

async fn text(raw: &Client, question: &str) -> String {
    raw.query_one(question, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn the_option_for_partitions_matters_only_when_the_table_is_created() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let (plain, parts) = (server.database("plain").await, server.database("parts").await);
    connect(&plain).await;
    options().partitions(3).connect(&parts).await.unwrap();
    let (raw_plain, raw_parts) = (raw(&plain).await, raw(&parts).await);
    assert_eq!(text(&raw_plain, SHAPE).await, text(&raw_parts, SHAPE).await);
    let partitions = "SELECT string_agg(concat_ws(' ', c.oid::regclass, pg_get_expr(c.relpartbound, c.oid), c.reloptions, \
         (SELECT count(*) FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid)), '\n' ORDER BY c.relname) \
         FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'idem.records'::regclass";
    let made = text(&raw_parts, partitions).await;
    for (n, line) in made.lines().enumerate() {
        let expected = format!("idem.records_{n} FOR VALUES WITH (modulus 3, remainder {n}) {{fillfactor=30}} 3");
        assert_eq!(line, expected);
    }
    // A handle that opens an existing table needs no option for partitions, and does not change the table.
    for (round, handle) in [PostgresStore::options(), options(), options().partitions(16)].into_iter().enumerate() {
        for url in [&plain, &parts] {
            everything(&handle.clone().connect(url).await.unwrap(), &format!("k{round}")).await;
        }
    }
    assert_eq!(text(&raw_plain, SHAPE).await, text(&raw_parts, SHAPE).await);
    assert_eq!((made.lines().count(), &text(&raw_parts, partitions).await), (3, &made));
    // The statements of `schema_sql` succeed on a table with the same number of partitions, and fail on a table with
    // another number or without partitions.
    let sql = |partitions| PostgresStore::options().partitions(partitions).schema_sql();
    raw_parts.batch_execute(&sql(3)).await.unwrap();
    raw_parts.batch_execute(&sql(4)).await.expect_err("of three partitions");
    raw_plain.batch_execute(&sql(3)).await.expect_err("not partitioned");
    assert_eq!(kind(options().partitions(129).connect(&plain).await), StoreErrorKind::Misconfigured);
}

#[tokio::test]
async fn records_move_to_a_partitioned_table_by_the_documented_steps() {
    let document = include_str!("../docs/operations.md").split_once("### From a plain table to partitions").unwrap().1;
    let recipe = document.split_once("```sql\n").unwrap().1.split_once("```").unwrap().0;
    let (before, after) = recipe.split_once("-- Here goes").unwrap();
    let after = after.split_once('\n').unwrap().1;
    let server = PostgresServer::start_with(&["fsync=off"]);
    let store = connect(&server.url()).await;
    everything(&store, "k").await;
    let lease = reserved(&store, "running").await;
    wins(&store, &request(&store, "expired").ttl(Duration::from_millis(1)).lease(Duration::from_millis(1))).await;
    let raw = server.raw().await;
    until(&raw, "SELECT expires_at < now() FROM idem.records WHERE key = '1/test/expired'").await;
    let all = "SELECT string_agg(r::text, '; ' ORDER BY r.key) FROM idem.records AS r WHERE r.key <> '1/test/expired'";
    let kept = text(&raw, all).await;
    let made = PostgresStore::options().partitions(4).schema_sql();
    raw.batch_execute(&format!("{before}{made}{after}")).await.unwrap();
    assert_eq!(
        text(&raw, &all.replace("WHERE r.key <> '1/test/expired'", "")).await,
        kept,
        "every record except the expired one is moved"
    );
    assert_eq!(number(&raw, "SELECT count(*) FROM pg_inherits WHERE inhparent = 'idem.records'::regclass").await, 4);
    // The open store and the running handler continue during the migration.
    assert_eq!(renew_all(&store, std::slice::from_ref(&lease)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    assert!(call(&store, "k:0", &AtomicU32::new(0)).await.1.replayed());
    everything(&store, "new").await;
    raw.batch_execute("DROP TABLE idem.records_before").await.unwrap();
    everything(&connect(&server.url()).await, "newer").await;
}

/// Compression of the result column, for each table of records in this schema.
async fn compressions(raw: &Client, schema: &str) -> Vec<String> {
    // The row is read as JSON, because servers before 14 have no column `attcompression`.
    let question = "SELECT to_jsonb(a)->>'attcompression' FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid \
                    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') \
                    AND a.attname = 'result' ORDER BY c.relname";
    raw.query(question, &[&schema]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn postgres_compresses_results_by_lz4_if_the_server_supports_it() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let (url, raw) = (server.url(), server.raw().await);
    let has_lz4 = raw.batch_execute("CREATE TABLE probe (it bytea COMPRESSION lz4)").await.is_ok();
    let chosen = if has_lz4 { "l" } else { "" };
    for (schema, partitions) in [("plain", 0), (r#"it's "his" \"#, 0), ("the part's", 3)] {
        let options = options().schema(schema).partitions(partitions);
        let store = options.clone().connect(&url).await.unwrap();
        let tables = usize::from(partitions) + 1;
        assert_eq!(compressions(&raw, schema).await, vec![chosen; tables], "{schema}");
        let lease = reserved(&store, "k").await;
        assert_eq!(store.finish(&lease, &of_size(100_000)).await.unwrap(), Verdict::Applied);
        let record = store.inspect(&lease.key).await.unwrap().unwrap().record;
        assert_eq!(record.state, of_size(100_000).state());
        if has_lz4 {
            let stored = format!("SELECT pg_column_compression(result) FROM {}.records", quoted(schema));
            assert_eq!(text(&raw, &stored).await, "lz4");
        }
        // A store that opens a table keeps the compression that an administrator has set.
        let choose = |by: &str| {
            let table = quoted(schema);
            format!("ALTER TABLE {table}.records ALTER COLUMN result SET COMPRESSION {by}")
        };
        if has_lz4 {
            for (by, is, then) in [("pglz", "p", "p"), ("default", "", "l")] {
                raw.batch_execute(&choose(by)).await.unwrap();
                options.clone().connect(&url).await.unwrap();
                assert_eq!(compressions(&raw, schema).await[0], is);
                raw.batch_execute(&options.schema_sql()).await.unwrap();
                assert_eq!(compressions(&raw, schema).await[0], then);
            }
        }
    }
}

/// The test replaces the server's view `pg_settings` by the view of a server without lz4.
#[tokio::test]
async fn a_table_on_a_server_without_lz4_keeps_the_default_compression() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let raw = server.raw().await;
    let settings = "pg_settings AS SELECT name, ARRAY['pglz'] AS enumvals FROM pg_catalog.pg_settings";
    for (kind, of) in [("not_built_with_it", ""), ("older", "WHERE name <> 'default_toast_compression'")] {
        raw.batch_execute(&format!("CREATE SCHEMA {kind}; CREATE VIEW {kind}.{settings} {of}")).await.unwrap();
        let url = format!("{}?options=-c%20search_path%3D{kind},pg_catalog", server.url());
        for (schema, partitions) in [("plain", 0), ("parts", 2)] {
            let schema = format!("{kind} {schema}");
            let store = options().schema(&schema).partitions(partitions).connect(&url).await.unwrap();
            assert!(compressions(&raw, &schema).await.iter().all(String::is_empty));
            everything(&store, "k").await;
        }
    }
}

#[tokio::test]
async fn the_sql_that_creates_partitions_is_pinned() {
    let sql = PostgresStore::options().partitions(2).schema_sql();
    assert_eq!(sql, include_str!("golden/postgres-partitioned-v1.sql"));
}

#[tokio::test]
async fn every_statement_of_the_store_uses_an_index() {
    let server = PostgresServer::start_with(&[
        "fsync=off",
        "session_preload_libraries=auto_explain",
        "auto_explain.log_min_duration=0",
        "auto_explain.log_analyze=on",
    ]);
    for (schema, partitions) in [("plain", 0), ("parts", 8)] {
        let store = options().schema(schema).partitions(partitions).connect(&server.url()).await.unwrap();
        let from = server.log().len();
        everything(&store, "k").await;
        store.list(&Filter::new().uncertain()).await.unwrap();
        store.count_undecided().await.unwrap();
        let log = server.log().split_off(from);
        assert!(log.contains("Index Scan using records_"), "{log}");
        for other in ["Seq Scan on records", "Bitmap Heap Scan"] {
            assert!(!log.contains(other), "{log}");
        }
        // The purge reads the time index from the oldest row on, and stops at its limit.
        let purge = log.split("LOG:").find(|it| it.contains("due AS MATERIALIZED")).expect("purged");
        let index =
            if partitions == 0 { "records_listed_at on records" } else { "records_0_listed_at_idx on records_0" };
        assert!(purge.contains(index) && purge.contains("Limit  ("), "{purge}");
        assert!(!purge.contains("Sort  ("), "the purge must not read all due rows first: {purge}");
        // A count of undecided keys reads an index that holds no other keys than those under `on_crash = fail`.
        let undecided = if partitions == 0 { "records_undecided on records" } else { "records_0_key_idx on records_0" };
        let count = log.split("LOG:").find(|it| it.contains("WHERE r.on_crash_fail AND")).expect("counted");
        assert!(count.contains(undecided), "{count}");
        // A statement for many keys reads, for each key, only the partition of that key.
        let lookup = log.split("LOG:").find(|it| it.contains("UPDATE") && it.contains("loops=20"));
        assert!(lookup.is_some(), "{log}");
    }
}

#[tokio::test]
async fn undecided_keys_are_counted_until_an_operator_decides() {
    for partitions in [0, 4] {
        let (store, ..) = open_with(partitions).await;
        let fail = |key: &str| request(&store, key).on_crash(OnCrash::Fail);
        for n in 0..3 {
            let lease = wins(&store, &fail(&format!("interrupted{n}"))).await;
            assert_eq!(store.release(&lease, Release::Interrupted).await.unwrap(), Verdict::Applied);
            let lease = wins(&store, &fail(&format!("done{n}"))).await;
            assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
            reserved(&store, &format!("retry{n}")).await;
        }
        assert_eq!(store.count_undecided().await.unwrap(), 3, "{partitions} partitions");
        let key = Key::new("test", "interrupted1").unwrap();
        let found = store.inspect(&key).await.unwrap().expect("a record");
        store.operator().reopen(&key, &found).await.unwrap();
        assert_eq!(store.count_undecided().await.unwrap(), 2, "{partitions} partitions");
    }
}

#[tokio::test]
async fn stores_in_different_schemas_share_no_record() {
    let ((a, ..), (b, ..)) = (open().await, open().await);
    assert_eq!((reserved(&a, "k").await.attempt, reserved(&b, "k").await.attempt), (1, 1));
    for schema in ["", "with\0nul", &"x".repeat(59)] {
        let refused = options().schema(schema).connect(&shared_schema().0).await;
        assert_eq!(kind(refused), StoreErrorKind::Misconfigured);
    }
    options().schema("x".repeat(58)).connect(&shared_schema().0).await.expect("the longest name");
}

#[tokio::test]
async fn a_missing_or_foreign_table_is_refused() {
    let (url, schema) = shared_schema();
    let plain = PostgresStore::options().schema(&schema);
    let error = plain.clone().connect(&url).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
    for way in ["idem schema migrate", "ensure_schema", "idem schema print postgres"] {
        assert!(error.to_string().contains(way), "{error}");
    }
    let store = options().schema(&schema).connect(&url).await.unwrap();
    let raw = raw(&url).await;
    for comment in ["'idem 2'", "'idem 10'", "'orders'", "NULL"] {
        raw.batch_execute(&format!("COMMENT ON TABLE {}.records IS {comment}", quoted(&schema))).await.unwrap();
        for options in [plain.clone(), options().schema(&schema)] {
            let error = options.connect(&url).await.unwrap_err();
            assert_eq!(error.kind(), StoreErrorKind::Misconfigured);
            assert!(error.to_string().contains("left alone"), "{error}");
        }
    }
    let noted = format!("COMMENT ON TABLE {}.records IS 'idem 1, ask Ida'", quoted(&schema));
    raw.batch_execute(&noted).await.unwrap();
    plain.connect(&url).await.expect("text after the version belongs to the administrator");
    // The schema is dropped while the store has it open.
    raw.batch_execute(&format!("DROP SCHEMA {} CASCADE", quoted(&schema))).await.unwrap();
    let error = store.reserve(&request(&store, "k")).await.unwrap_err();
    assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn the_stored_form_is_pinned() {
    let (store, raw, table) = open().await;
    write_pinned_records(&store).await;

    // The rows are compared without their times, and with the retention as a difference of two times.
    let rows = format!(
        "SELECT (to_jsonb(r) - '{{expires_at,lapses_at,listed_at,first_seen_at,began_at}}'::text[] \
         || jsonb_build_object('retained', extract(epoch FROM expires_at - lapses_at)::int))::text \
         FROM {table} AS r ORDER BY key"
    );
    let rows = raw.query(&rows, &[]).await.unwrap();
    let written: String = rows.iter().map(|row| format!("{}\n", row.get::<_, &str>(0))).collect();
    if std::env::var_os("IDEM_GOLDEN").is_some() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/postgres-v1.txt");
        std::fs::write(path, &written).unwrap();
    }
    let golden = include_str!("golden/postgres-v1.txt");
    assert_eq!(written, golden, "a released format never changes: give a new format a new version");

    // A store reads the pinned rows from another table.
    let (reader, raw, table) = open().await;
    for line in golden.lines() {
        let times = "'{\"expires_at\": \"9999-01-01\", \"lapses_at\": \"9998-01-01\", \"listed_at\": \"9999-01-01\", \
                     \"first_seen_at\": \"1999-01-01\", \"began_at\": \"1999-01-01\"}'";
        let row = format!("jsonb_populate_record(NULL::{table}, $1::text::jsonb || {times})");
        raw.execute(&format!("INSERT INTO {table} SELECT * FROM {row}"), &[&line]).await.unwrap();
        let name = line.split("test/").nth(1).and_then(|rest| rest.split('"').next()).unwrap();
        let key = Key::new("test", name).unwrap();
        let (read, wrote) = (reader.inspect(&key).await.unwrap(), store.inspect(&key).await.unwrap());
        assert_eq!(read.unwrap().record, wrote.unwrap().record, "{name}");
    }
}

/// A broker that is away.
struct NoBroker;

impl Sender for NoBroker {
    fn send<'a>(&'a self, _: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async { Err("the broker is away".into()) })
    }
}

#[tokio::test]
async fn marks_share_a_statement_and_a_damaged_record_fails_no_other() {
    // A server may read a backslash in a literal as an escape.
    for (partitions, setting) in [(0, "on"), (4, "on"), (0, "off")] {
        let (url, schema) = shared_schema();
        let url = format!(
            "{url}{}options=-c%20standard_conforming_strings%3D{setting}",
            if url.contains('?') { '&' } else { '?' }
        );
        let store = options().schema(&schema).partitions(partitions).connect(&url).await.unwrap().with_sender(NoBroker);
        let (raw, table) = (raw(&shared_schema().0).await, format!("{}.records", quoted(&schema)));
        let name = |n: usize| Key::new("pay", n).unwrap();
        for n in 0..40 {
            let body = async {
                current()?.outbox().push("orders", OutgoingMessage::new(vec![b'x'; n]))?;
                Ok::<_, Error>("r".repeat(n))
            };
            let unsent = Operation::new(&store, Ok(name(n)), POLICY).run(body).await;
            assert!(matches!(unsent, Err(Error::Unsent { .. })), "{unsent:?}");
        }
        let seen = join_all((0..40).map(async |n| store.inspect(&name(n)).await.unwrap().unwrap().revision())).await;
        // Every tenth record is cut off, names a longer codec, or has a larger result than it holds.
        let damages = [
            "substring(result FOR 5)",
            "set_byte(result, 2, 255)",
            "overlay(result PLACING '\\x7fffffffffffffff' FROM 8)",
            "overlay(result PLACING '\\xffffffffffffffff' FROM 8)",
        ];
        for (n, damaged) in damages.iter().enumerate() {
            let statement = format!("UPDATE {table} SET result = {damaged} WHERE key = $1");
            assert_eq!(raw.execute(&statement, &[&name(10 * n).as_str()]).await.unwrap(), 1);
        }
        let marks: Vec<_> = (0..40).map(|n| Decision::mark_sent(&name(n), seen[n], None)).collect();
        for _ in 0..2 {
            let answers = join_all(marks.iter().map(|mark| store.decide(mark))).await;
            for (n, answer) in answers.into_iter().enumerate() {
                let answer = answer.unwrap();
                match n % 10 {
                    0 => assert_eq!(answer, DecisionAnswer::Damaged, "{n}"),
                    _ => assert_eq!(answer, DecisionAnswer::Applied, "{n}"),
                }
            }
        }
        for n in (0..40).filter(|n| n % 10 > 0) {
            let found = store.inspect(&name(n)).await.unwrap().unwrap();
            let bytes = serde_json::to_vec(&"r".repeat(n)).unwrap();
            let result = StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.into() };
            assert_eq!(found.record.state, State::Completed(result), "{n}");
            assert_eq!(found.revision(), seen[n], "a mark is no other change: {n}");
        }
    }
}

#[tokio::test]
async fn a_record_with_a_journal_of_a_later_format_is_left_unchanged() {
    let (store, raw, table) = open().await;
    let lease = reserved(&store, "k").await;
    assert_eq!(store.append(&lease, &one_step()).await.unwrap(), Verdict::Applied);
    let bytes = i64::try_from(one_step().bytes().len()).unwrap();
    // The runbook has this statement for the tables of three stores.
    let counted = raw.query_one(&statement_about_journals(&table), &[]).await.unwrap();
    assert_eq!((counted.get::<_, &str>(0), counted.get::<_, i64>(1)), ("pending", 1));
    assert_eq!((i64::from(counted.get::<_, i32>(2)), counted.get::<_, i64>(3)), (bytes, bytes));
    raw.batch_execute(&format!("UPDATE {table} SET format = 2")).await.unwrap();
    let text = async || -> String {
        raw.query_one(&format!("SELECT string_agg(r::text, ',') FROM {table} AS r"), &[]).await.unwrap().get(0)
    };
    let before = text().await;
    is_of_a_later_format(&store, "k").await;
    assert_eq!(text().await, before);
}

#[tokio::test]
async fn damaged_rows_and_rows_of_a_later_version_are_left_unchanged() {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).connect(&url).await.unwrap();
    let raw = raw(&url).await;
    let table = format!("{}.records", quoted(&schema));
    write_nonsense(&url, &schema, "1/test/later").await;
    // Rows of a later version, and rows with one damaged column.
    for (name, change) in [
        ("state", "state = 'X'"),
        ("owner", "owner = 'short'"),
        ("attempt", "attempt = 4294967296"),
        ("attempts_used", "attempts_used = 2"),
        ("lease", "lease_ms = NULL"),
        ("ttl", "ttl_ms = -1"),
        ("codec", "codec = 'json', result = 'x'"),
    ] {
        reserved(&store, name).await;
        raw.batch_execute(&format!("UPDATE {table} SET {change} WHERE key = '1/test/{name}'")).await.unwrap();
    }
    let text = async || -> String {
        let rows = format!("SELECT string_agg(r::text, ',' ORDER BY key) FROM {table} AS r");
        raw.query_one(&rows, &[]).await.unwrap().get(0)
    };
    let before = text().await;
    for name in ["later", "state", "owner", "attempt", "attempts_used", "lease", "ttl", "codec"] {
        let error = store.reserve(&request(&store, name)).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Corrupt, "{name}: {error}");
        let found = store.inspect(&Key::new("test", name).unwrap()).await.unwrap().unwrap();
        assert_eq!(found.standing(), Standing::Damaged, "{name}");
    }
    assert_eq!(text().await, before);
    // Expired rows of a later version, and expired damaged rows, are left unchanged, too.
    raw.batch_execute(&format!("UPDATE {table} SET expires_at = now(), listed_at = now() WHERE format = 99"))
        .await
        .unwrap();
    let before = text().await;
    assert_eq!(kind(store.reserve(&request(&store, "later")).await), StoreErrorKind::Corrupt);
    assert_eq!(store.purge(100).await.unwrap(), 0, "a record of a later version is not purged");
    assert_eq!(text().await, before);
    idem_tests::forget_damaged(&store, &Key::new("test", "later").unwrap(), "format 99").await;
    for name in ["state", "owner", "attempt", "attempts_used", "lease", "ttl", "codec"] {
        idem_tests::forget_damaged(&store, &Key::new("test", name).unwrap(), "damaged").await;
    }
}

// Costs in statements.

/// Counter of the statements that the server has received since the last count.
struct Counter<'a> {
    server: &'a PostgresServer,
    seen: usize,
}

impl Counter<'_> {
    fn new(server: &PostgresServer) -> Counter<'_> {
        let mut counter = Counter { server, seen: 0 };
        counter.count();
        counter
    }

    fn count(&mut self) -> usize {
        let log = self.server.log();
        let all = log.lines().filter(|line| line.contains("LOG:  execute ") && line.contains(".records")).count();
        let new = all - self.seen;
        self.seen = all;
        new
    }
}

#[tokio::test]
async fn a_first_run_takes_two_statements_and_every_other_call_takes_one() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let (owner, other) = (connect(&server.url()).await, connect(&server.url()).await);
    let runs = AtomicU32::new(0);
    let mut counter = Counter::new(&server);
    for n in 0..5 {
        call(&owner, &format!("k{n}"), &runs).await.0.unwrap();
        assert_eq!(counter.count(), 2, "a first run");
    }
    for n in 0..20 {
        assert!(call(&other, &format!("k{}", n % 5), &runs).await.1.replayed());
        assert_eq!(counter.count(), 1, "a replay");
    }
    let publisher = connect(&server.url()).await.with_sender(Confirming);
    for n in 0..3 {
        counter.count();
        assert!(publish(&publisher, &format!("published {n}")).await.executed());
        assert_eq!(counter.count(), 3, "a first run with a message: one write more");
        assert!(publish(&publisher, &format!("published {n}")).await.replayed());
        assert_eq!(counter.count(), 1, "a replay with no message left");
    }
    let busy = reserved(&owner, "busy").await;
    counter.count();
    for store in [&owner, &other] {
        assert!(matches!(call(store, "busy", &runs).await.0, Err(Error::InProgress { .. })));
        assert_eq!(counter.count(), 1, "in progress");
    }
    assert_eq!(renew_all(&owner, std::slice::from_ref(&busy)).await.unwrap(), [Verdict::Applied]);
    assert_eq!(counter.count(), 1, "a beat");
    assert_eq!(owner.release(&busy, Release::Returned).await.unwrap(), Verdict::Applied);
    assert_eq!(counter.count(), 1, "a release");
}

#[tokio::test]
async fn concurrent_operations_share_statements() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    let runs = AtomicU32::new(0);
    let mut counter = Counter::new(&server);
    let names: Vec<_> = (0..500).map(|n| format!("k{n}")).collect();
    for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
        calls.0.unwrap();
    }
    let first = counter.count();
    assert!(first < 100, "500 first runs in {first} statements");
    for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
        assert!(calls.1.replayed());
    }
    let replays = counter.count();
    assert!(replays < 50, "500 replays in {replays} statements");
    let leases = join_all((0..10_000).map(|n| {
        let store = store.clone();
        async move { reserved(&store, &format!("lease{n}")).await }
    }))
    .await;
    counter.count();
    assert!(renew_all(&store, &leases).await.unwrap().iter().all(|answer| *answer == Verdict::Applied));
    assert_eq!(counter.count(), 20, "500 leases a statement");
}

/// Runs a handler that has three steps and returns its own number.
async fn in_three_steps(store: &PostgresStore, number: u32) -> Result<u32, Error> {
    let key = Ok::<_, idem_runtime::key::KeyError>(Key::new("test", format!("steps{number}")).unwrap());
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
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    let mut counter = Counter::new(&server);
    assert_eq!(in_three_steps(&store, 0).await.unwrap(), 0);
    assert_eq!(counter.count(), 5, "a lone handler: the reservation, three steps and the result");
    let handlers = join_all((1..201).map(|n| in_three_steps(&store, n))).await;
    assert_eq!(handlers.into_iter().map(Result::unwrap).collect::<Vec<_>>(), (1..201).collect::<Vec<_>>());
    let statements = counter.count();
    // Without shared statements, the steps of 200 handlers alone are 600 statements.
    assert!(statements < 100, "200 handlers with three steps in {statements} statements");
}

/// Journal of `bytes` bytes.
fn journal(bytes: usize) -> Journal {
    Journal::new(vec![b'j'; bytes]).unwrap()
}

#[tokio::test]
async fn large_journals_share_no_statement() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    // With two connections, large journals share statements of 256 KB, so that other calls find a free connection.
    let few = PostgresStore::options().pool_size(2).connect(&server.url()).await.unwrap();
    let mut counter = Counter::new(&server);
    for (name, store, bytes, statements) in [
        ("small", &store, 8_000, 2),
        ("over 8 KB", &store, 9_000, 20),
        ("large", &store, 100_000, 20),
        ("few", &few, 9_000, 2),
        ("few and large", &few, 300_000, 20),
    ] {
        let leases = join_all((0..20).map(async |n| reserved(store, &format!("{name}:{n}")).await)).await;
        counter.count();
        let journal = journal(bytes);
        for written in join_all(leases.iter().map(|lease| store.append(lease, &journal))).await {
            assert_eq!(written.unwrap(), Verdict::Applied);
        }
        assert_eq!(counter.count(), statements, "{name}: 20 journals of {bytes} bytes");
        for lease in &leases {
            let found = store.inspect(&lease.key).await.unwrap().unwrap();
            assert_eq!(found.record.journal, Some(journal.clone()), "{name}");
        }
    }
}

/// A journal that is sent together with other journals, with the answer that it must get and the length of the journal
/// that its record must have afterwards.
struct SentJournal {
    why: &'static str,
    lease: Lease,
    bytes: usize,
    answer: Result<Verdict, StoreErrorKind>,
    kept: Option<usize>,
}

#[tokio::test]
async fn a_journal_that_is_refused_costs_no_other_journal_of_its_statement() {
    for (partitions, with_error) in [(0, false), (4, false), (0, true)] {
        writes_all_but_the_refused(partitions, with_error).await;
    }
}

async fn writes_all_but_the_refused(partitions: u16, with_error: bool) {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = options().partitions(partitions).connect(&server.url()).await.unwrap();
    let raw = server.raw().await;
    // The server refuses this record, for a reason that fails the whole statement.
    raw.batch_execute(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF NEW.key LIKE '%oversized%' THEN RAISE 'too large' USING ERRCODE = '54000'; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER refuse BEFORE UPDATE ON idem.records FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .await
    .unwrap();
    let mut journals = Vec::new();
    let mut send = |why, lease, bytes, answer, kept| journals.push(SentJournal { why, lease, bytes, answer, kept });
    let (applied, refused) = (Ok(Verdict::Applied), Ok(Verdict::Refused));
    let with_journal = async |name: &str| {
        let lease = reserved(&store, name).await;
        assert_eq!(store.append(&lease, &journal(10)).await.unwrap(), Verdict::Applied);
        lease
    };
    for n in 0..40 {
        send("the journal of an attempt", reserved(&store, &format!("k{n}")).await, 20 + n, applied, Some(20 + n));
    }
    let mut foreign = with_journal("foreign").await;
    foreign.owner = store.context().new_owner();
    send("with another owner token", foreign, 20, refused, Some(10));
    let mut other = with_journal("other").await;
    other.attempt += 1;
    send("with another attempt number", other, 20, refused, Some(10));
    send("shorter than the journal in the record", with_journal("shorter").await, 5, applied, Some(10));
    let ended = with_journal("ended").await;
    assert_eq!(store.release(&ended, Release::Returned).await.unwrap(), Verdict::Applied);
    send("after the end of the attempt", ended, 20, refused, Some(10));
    let brief = |name: &str| request(&store, name).lease(Duration::from_millis(1));
    let (lapsed, taken) = (wins(&store, &brief("lapsed")).await, wins(&store, &brief("taken")).await);
    until(&raw, "SELECT bool_and(lapses_at < clock_timestamp()) FROM idem.records WHERE lease_ms = 1").await;
    let successor = reserved(&store, "taken").await;
    assert_eq!(successor.attempt, 2);
    send("after the lapse of the lease", lapsed, 20, applied, Some(20));
    send("after a takeover", taken, 50, refused, Some(30));
    send("of the attempt that took over", successor, 30, applied, Some(30));
    let twice = reserved(&store, "twice").await;
    for bytes in [20, 40, 30] {
        send("several journals of one attempt", twice.clone(), bytes, applied, Some(40));
    }
    let absent = reserved(&store, "absent").await;
    raw.execute("DELETE FROM idem.records WHERE key LIKE '%absent%'", &[]).await.unwrap();
    send("without a record", absent, 20, refused, None);
    if with_error {
        let oversized = reserved(&store, "oversized").await;
        send("of a record that the server refuses", oversized, 20, Err(StoreErrorKind::TooLarge), None);
    }
    check_journals(&server, &store, &raw, &journals, with_error).await;
}

/// Sends all journals concurrently, and checks their answers, their records and the number of their statements.
async fn check_journals(
    server: &PostgresServer,
    store: &PostgresStore,
    raw: &Client,
    sent: &[SentJournal],
    with_error: bool,
) {
    let whole = async |key: &str| -> Option<String> {
        let row = raw.query_opt("SELECT r::text FROM idem.records r WHERE key = $1", &[&key]).await.unwrap();
        row.map(|row| row.get(0))
    };
    let before = join_all(sent.iter().map(|it| whole(it.lease.key.as_str()))).await;
    let server_time: String = raw.query_one("SELECT clock_timestamp()::text", &[]).await.unwrap().get(0);
    let mut counter = Counter::new(server);
    let journals: Vec<_> = sent.iter().map(|it| journal(it.bytes)).collect();
    let answers = join_all(sent.iter().zip(&journals).map(|(it, journal)| store.append(&it.lease, journal))).await;
    let statements = counter.count();
    for ((it, answer), before) in sent.iter().zip(answers).zip(before) {
        let (why, key) = (it.why, it.lease.key.as_str());
        assert_eq!(answer.map_err(|error| error.kind()), it.answer, "{why}");
        let found = store.inspect(&it.lease.key).await.unwrap();
        let kept = found.and_then(|found| found.record.journal).map(|journal| journal.bytes().len());
        assert_eq!(kept, it.kept, "{why}: {key}");
        let is_renewed = format!(
            "SELECT count(*) FROM idem.records WHERE key = '{key}' AND state = 'pending' \
             AND lapses_at >= '{server_time}'::timestamptz + lease_ms * interval '1 ms' \
             AND expires_at >= '{server_time}'::timestamptz + (lease_ms + ttl_ms) * interval '1 ms'"
        );
        match it.answer {
            Ok(Verdict::Applied) => assert_eq!(number(raw, &is_renewed).await, 1, "{why}: the lease is renewed"),
            _ if why == "after a takeover" => {}
            _ => assert_eq!(whole(key).await, before, "{why}: the record is unchanged"),
        }
    }
    // A record that was not renewed is read, which shows that its attempt has lost it.
    let reads = sent.iter().filter(|it| it.answer == Ok(Verdict::Refused)).count();
    if with_error {
        // Two journals for one row, sent alone, may find the row locked by each other. They are then sent again.
        assert!(statements > sent.len() + reads, "{statements} statements: one for all, then one for each journal");
    } else {
        assert_eq!(statements, 2 + reads, "the first journal alone, and all others in one statement");
    }
}

/// Completion whose result has `bytes` bytes.
fn of_size(bytes: usize) -> Finish {
    Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: vec![b'1'; bytes].into() })
}

#[tokio::test]
async fn large_results_share_no_statement() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    let mut counter = Counter::new(&server);
    for (bytes, statements) in [(8_000, 2), (9_000, 20), (100_000, 20)] {
        let leases = join_all((0..20).map(async |n| reserved(&store, &format!("{bytes}:{n}")).await)).await;
        counter.count();
        let finish = of_size(bytes);
        for ended in join_all(leases.iter().map(|lease| store.finish(lease, &finish))).await {
            assert_eq!(ended.unwrap(), Verdict::Applied);
        }
        assert_eq!(counter.count(), statements, "20 results of {bytes} bytes");
    }
    // With two connections, large results share a statement, so that other calls find a free connection.
    let store = PostgresStore::options().pool_size(2).connect(&server.url()).await.unwrap();
    let leases = join_all((0..20).map(async |n| reserved(&store, &format!("few:{n}")).await)).await;
    counter.count();
    let finish = of_size(9_000);
    for ended in join_all(leases.iter().map(|lease| store.finish(lease, &finish))).await {
        assert_eq!(ended.unwrap(), Verdict::Applied);
    }
    assert_eq!(counter.count(), 2);
}

#[tokio::test]
async fn completions_with_large_results_leave_connections_free_and_outlive_their_callers() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    connect(&server.url()).await;
    // A trigger blocks statements with large results until the test releases its lock.
    let raw = server.raw().await;
    raw.batch_execute(
        "CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS \
         'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN new; END'; \
         CREATE TRIGGER hold BEFORE UPDATE ON idem.records FOR EACH ROW WHEN (octet_length(new.result) > 8192) \
         EXECUTE FUNCTION hold(); SELECT pg_advisory_lock(7)",
    )
    .await
    .unwrap();
    let url = format!("{}?options=-c%20lock_timeout%3D0", server.url());
    let store = PostgresStore::options().response_timeout(Duration::from_secs(60)).connect(&url).await.unwrap();
    let leases = join_all((0..12).map(async |n| reserved(&store, &format!("large{n}")).await)).await;
    let finish = of_size(20_000);
    let mut ends: Vec<_> = leases.iter().map(|lease| store.finish(lease, &finish)).map(Box::pin).collect();
    for end in &mut ends {
        assert!(poll_once(end.as_mut()).await.is_pending());
    }
    let held = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND application_name = 'idem'";
    let enough = held.replace("count(*)", "count(*) >= 3");
    tokio::select! {
        _ = join_all(ends.iter_mut()) => panic!("the completions must wait"),
        () = until(&raw, &enough) => {}
    }
    // Some completions have been sent; the others wait until they may use a connection. Some of their callers are
    // dropped.
    drop(ends.drain(1..7));
    let runs = AtomicU32::new(0);
    let small = async {
        for n in 0..10 {
            call(&store, &format!("small{n}"), &runs).await.0.unwrap();
        }
        let names: Vec<_> = (10..50).map(|n| format!("small{n}")).collect();
        for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
            calls.0.unwrap();
        }
    };
    tokio::select! {
        _ = join_all(ends.iter_mut()) => panic!("the completions must wait"),
        () = small => {}
    }
    assert_eq!(number(&raw, held).await, 3, "of six connections");
    // All large completions are recorded, also those whose callers were dropped.
    raw.batch_execute("SELECT pg_advisory_unlock(7)").await.unwrap();
    for end in join_all(ends).await {
        assert_eq!(end.unwrap(), Verdict::Applied);
    }
    let all = "SELECT count(*) = 12 FROM idem.records WHERE octet_length(result) = 20000 AND key LIKE '%large%'";
    until(&raw, all).await;
}

#[tokio::test]
async fn a_replay_locks_and_writes_nothing() {
    let server = PostgresServer::start_with(&["autovacuum=off"]);
    let (store, raw) = (connect(&server.url()).await, server.raw().await);
    let runs = AtomicU32::new(0);
    let names: Vec<_> = (0..50).map(|n| format!("k{n}")).collect();
    for name in &names {
        call(&store, name, &runs).await.0.unwrap();
    }
    // Duplicates make their reservations one by one and concurrently, on a store that reads first and on a store that
    // inserts first. Before the measurement, a `count` reads all rows, so that the server cleans its pages.
    let other = connect(&server.url()).await;
    number(&raw, "SELECT count(*) FROM idem.records").await;
    let written = "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint + txid_snapshot_xmax(txid_current_snapshot())";
    let before = number(&raw, written).await;
    for store in [&store, &other] {
        for name in &names {
            assert!(call(store, name, &runs).await.1.replayed());
        }
        assert!(join_all(names.iter().map(|name| call(store, name, &runs))).await.iter().all(|it| it.1.replayed()));
    }
    assert_eq!(number(&raw, written).await, before, "no log was written, and no transaction had a number");
    assert_eq!(number(&raw, "SELECT count(*) FROM idem.records WHERE xmax::text <> '0'").await, 0, "no row is locked");
}

#[tokio::test]
async fn no_transaction_is_open_while_a_handler_runs() {
    let server = PostgresServer::start();
    let (store, raw) = (connect(&server.url()).await, server.raw().await);
    let body = async {
        current().unwrap().confirm_lease().await?;
        let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idem' AND xact_start IS NOT NULL";
        assert_eq!(number(&raw, open).await, 0);
        let idle = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idem' AND state = 'idle'";
        assert!(number(&raw, idle).await > 0, "the connections are open");
        let locks = "SELECT count(*) FROM pg_locks WHERE relation = 'idem.records'::regclass";
        assert_eq!(number(&raw, locks).await, 0);
        Ok::<_, Error>(1)
    };
    Operation::new(&store, Key::new("test", "k"), POLICY).run(body).await.unwrap();
}

#[tokio::test]
async fn a_completion_changes_no_indexed_column() {
    let server = PostgresServer::start_with(&["fsync=off", "autovacuum=off"]);
    let store = connect(&server.url()).await;
    for round in 0..20 {
        let runs = AtomicU32::new(0);
        let names: Vec<_> = (0..100).map(|n| format!("k{round}:{n}")).collect();
        for calls in join_all(names.iter().map(|name| call(&store, name, &runs))).await {
            calls.0.unwrap();
        }
    }
    // A session reports its statistics when it ends.
    drop(store);
    let raw = server.raw().await;
    let stats = "FROM pg_stat_user_tables WHERE relname = 'records'";
    until(&raw, &format!("SELECT n_tup_upd >= 2000 {stats}")).await;
    let hot = number(&raw, &format!("SELECT n_tup_hot_upd * 1000 / n_tup_upd {stats}")).await;
    assert!(hot >= 950, "only {hot} of 1000 updates changed no index");
}

#[tokio::test]
async fn a_purge_deletes_only_expired_records() {
    for partitions in [0, 4] {
        purges_expired_records(partitions).await;
    }
}

async fn purges_expired_records(partitions: u16) {
    let (store, raw, table) = open_with(partitions).await;
    let short = Duration::from_millis(1);
    for n in 0..10 {
        let expired = wins(&store, &request(&store, &format!("expired{n}")).ttl(short)).await;
        assert_eq!(store.finish(&expired, &done()).await.unwrap(), Verdict::Applied);
        // The purge already considers these pending records, because a completion could have let them expire early. It
        // must keep them.
        wins(&store, &request(&store, &format!("pending{n}")).ttl(short)).await;
        let kept = reserved(&store, &format!("kept{n}")).await;
        assert_eq!(store.finish(&kept, &done()).await.unwrap(), Verdict::Applied);
    }
    until(&raw, &format!("SELECT bool_and(expires_at < now()) FROM {table} WHERE key LIKE '%expired%'")).await;
    let key = Key::new("test", "expired0").unwrap();
    assert!(store.inspect(&key).await.unwrap().is_none(), "expired counts as absent, purged or not");
    let mut deleted = Vec::new();
    for _ in 0..4 {
        deleted.push(store.purge(5).await.unwrap());
    }
    assert!(deleted.iter().all(|count| *count <= 5), "{deleted:?}");
    assert_eq!(deleted.iter().sum::<u64>(), 10);
    assert_eq!(store.purge(5).await.unwrap(), 0);
    assert_eq!(number(&raw, &format!("SELECT count(*) FROM {table}")).await, 20);
    let listed = format!("SELECT count(*) FROM {table} WHERE listed_at <= now() OR listed_at > expires_at");
    assert_eq!(number(&raw, &listed).await, 0, "an unexpired record is listed for its expiry");
}

#[tokio::test]
async fn a_purge_waits_for_no_lock() {
    for partitions in [0, 4] {
        purges_without_waiting(partitions).await;
    }
}

async fn purges_without_waiting(partitions: u16) {
    let (store, raw, table) = open_with(partitions).await;
    for name in ["a", "b"] {
        let lease = wins(&store, &request(&store, name).ttl(Duration::from_millis(1))).await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    }
    until(&raw, &format!("SELECT bool_and(expires_at < now()) FROM {table}")).await;
    raw.batch_execute(&format!("BEGIN; SELECT 1 FROM {table} WHERE key = '1/test/a' FOR UPDATE")).await.unwrap();
    assert_eq!(store.purge(10).await.unwrap(), 1);
    raw.batch_execute("COMMIT").await.unwrap();
    assert_eq!(store.purge(10).await.unwrap(), 1);
}

#[tokio::test]
async fn a_purge_reads_no_removed_row_twice() {
    let server = PostgresServer::start_with(&["fsync=off", "autovacuum=off"]);
    for (schema, partitions) in [("plain", 0), ("parts", 4)] {
        let options = options().schema(schema).partitions(partitions);
        let store = options.connect(&server.url()).await.unwrap();
        let raw = server.raw().await;
        let rows = format!(
            "INSERT INTO {schema}.records (key, owner, format, state, attempt, attempts_used, on_crash_fail, lapses_at, \
             expires_at, listed_at, first_seen_at, began_at) SELECT '1/test/' || n, '\\x00112233445566778899aabbccddeeff', 1, \
             'completed', 1, 1, false, now(), now() - interval '1 h', now() - interval '1 h' - n * interval '1 s', now(), now() \
             FROM generate_series(1, 4000) AS n"
        );
        raw.batch_execute(&rows).await.unwrap();
        // A deleted row stays in the indexes while an open transaction may still see it.
        let reader = server.raw().await;
        reader.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class LIMIT 1").await.unwrap();
        let holder = lock_row(&server.url(), &format!("{schema}.records"), "3000").await;
        let mut removed = 0;
        for _ in 0..40 {
            removed += store.purge(100).await.unwrap();
        }
        assert_eq!(removed, 3999, "every row except the locked one is purged");
        holder.batch_execute("COMMIT").await.unwrap();
        assert_eq!(store.purge(100).await.unwrap(), 1, "the row that was locked is purged later");
        assert_eq!(store.purge(100).await.unwrap(), 0);
        // A session reports its statistics when it ends.
        drop(store);
        let counts = format!(
            "SELECT coalesce(sum(idx_tup_read), 0)::bigint FROM pg_stat_user_indexes WHERE schemaname = '{schema}' \
             AND indexrelname LIKE '%listed_at%'"
        );
        until(&raw, &format!("SELECT ({counts}) >= 4000")).await;
        let read = number(&raw, &counts).await;
        assert!(read < 4 * 4000 + 2000, "{read} entries were read to remove 4000 records");
        reader.batch_execute("COMMIT").await.unwrap();
    }
}

#[tokio::test]
async fn the_background_purge_works_until_its_store_is_dropped() {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).connect(&url).await.unwrap();
    let (raw, table) = (raw(&url).await, format!("{}.records", quoted(&schema)));
    let purging = options().schema(&schema).purge_every(Duration::from_millis(20)).connect(&url).await.unwrap();
    let expiring = async |name: &str| {
        let lease = wins(&store, &request(&store, name).ttl(Duration::from_millis(1))).await;
        assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    };
    expiring("a").await;
    until(&raw, &format!("SELECT count(*) = 0 FROM {table}")).await;
    drop(purging);
    tokio::time::sleep(Duration::from_millis(50)).await;
    expiring("b").await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(number(&raw, &format!("SELECT count(*) FROM {table}")).await, 1);
}

// Errors.

#[tokio::test]
async fn results_too_large_for_a_row_are_refused_before_the_write() {
    let (store, ..) = open().await;
    let lease = reserved(&store, "k").await;
    // No code reads these zeroes, so the operating system assigns no memory to them.
    let bytes = vec![0; 1_000_000_001].into();
    let large = Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes });
    assert_eq!(kind(store.finish(&lease, &large).await), StoreErrorKind::TooLarge);
    assert!(matches!(store.inspect(&lease.key).await.unwrap().unwrap().record.state, State::Pending { .. }));
}

#[tokio::test]
async fn urls_that_can_not_be_used_are_refused_without_showing_the_password() {
    let server = PostgresServer::start();
    let raw = server.raw().await;
    raw.batch_execute("CREATE ROLE ida LOGIN PASSWORD 'secret'; CREATE ROLE guest LOGIN").await.unwrap();
    raw.batch_execute("CREATE DATABASE ida OWNER ida").await.unwrap();
    let hba = "host all ida 127.0.0.1/32 scram-sha-256\nhost all postgres 127.0.0.1/32 trust\n";
    server.file("data/pg_hba.conf", hba.as_bytes());
    raw.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until(&raw, "SELECT count(*) = 2 FROM pg_hba_file_rules").await;
    let at = format!("127.0.0.1:{}", server.port());
    let store = connect(&format!("postgres://ida:secret@{at}/ida")).await;
    assert!(!format!("{store:?} {:?}", store.handle()).contains("secret"));
    for url in [
        format!("postgres://ida:topsecret@{at}/ida"),
        format!("postgres://ida@{at}/ida"),
        format!("postgres://ida:topsecret@{at}:x/ida"),
        format!("postgres://ida:topsecret@{at}/ida?sslmode=maybe"),
        format!("postgres://postgres:topsecret@{at}/nowhere"),
        format!("postgres://postgres:topsecret@{at}/postgres?sslmode=require"),
        "topsecret".to_owned(),
        "password=topsecret port=x".to_owned(),
    ] {
        let error = options().connect(&url).await.unwrap_err();
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{url}: {error}");
        let shown = format!("{error} {error:?}");
        assert!(!shown.contains("topsecret"), "{shown}");
    }
    // The login of this test has only the right to connect.
    connect(&server.database("others").await).await;
    server.file("data/pg_hba.conf", format!("{hba}host all guest 127.0.0.1/32 trust\n").as_bytes());
    raw.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until(&raw, "SELECT count(*) = 3 FROM pg_hba_file_rules").await;
    let refused = PostgresStore::connect(&format!("postgres://guest@{at}/others")).await;
    assert_eq!(kind(refused), StoreErrorKind::Misconfigured);
}

#[tokio::test]
async fn connect_names_every_right_that_is_missing() {
    let server = PostgresServer::start();
    let raw = server.raw().await;
    connect(&server.url()).await;
    raw.batch_execute("CREATE ROLE worker LOGIN").await.unwrap();
    let hba = std::fs::read_to_string(server.folder().join("data/pg_hba.conf")).unwrap();
    server.file("data/pg_hba.conf", format!("host all worker 127.0.0.1/32 trust\n{hba}").as_bytes());
    raw.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until(&raw, "SELECT count(*) > 0 FROM pg_hba_file_rules WHERE 'worker' = ANY(user_name)").await;
    let url = server.url().replace("//postgres@", "//worker@");
    let refused = async |purges: bool, named: &[&str]| {
        let options = PostgresStore::options();
        let options = if purges { options.purge_every(Duration::from_secs(60)) } else { options };
        match options.connect(&url).await {
            Ok(_) => assert!(named.is_empty(), "connected without {named:?}"),
            Err(error) => {
                assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{error}");
                let said = error.to_string();
                for right in ["USAGE", "SELECT", "INSERT", "UPDATE", "DELETE"] {
                    assert_eq!(said.contains(right), named.contains(&right), "{right}: {said}");
                }
            }
        }
    };
    refused(false, &["USAGE", "SELECT", "INSERT", "UPDATE"]).await;
    raw.batch_execute("GRANT USAGE ON SCHEMA idem TO worker").await.unwrap();
    refused(false, &["SELECT", "INSERT", "UPDATE"]).await;
    raw.batch_execute("GRANT ALL ON idem.records TO worker").await.unwrap();
    refused(true, &[]).await;
    for right in ["SELECT", "INSERT", "UPDATE"] {
        raw.batch_execute(&format!("REVOKE {right} ON idem.records FROM worker")).await.unwrap();
        refused(true, &[right]).await;
        raw.batch_execute(&format!("GRANT {right} ON idem.records TO worker")).await.unwrap();
    }
    raw.batch_execute("REVOKE DELETE ON idem.records FROM worker").await.unwrap();
    refused(false, &[]).await;
    refused(true, &["DELETE"]).await;
}

#[tokio::test]
async fn a_store_whose_table_a_column_or_a_right_is_missing_is_not_ready() {
    let server = PostgresServer::start();
    let raw = server.raw().await;
    let store = connect(&server.url()).await;
    assert!(store.health().await.is_ready());
    // Each loss, and what restores the table.
    let mut losses = vec![
        (
            "ALTER TABLE idem.records RENAME TO elsewhere".to_owned(),
            "ALTER TABLE idem.elsewhere RENAME TO records".to_owned(),
        ),
        (
            "ALTER TABLE idem.records RENAME COLUMN waited TO awaited".to_owned(),
            "ALTER TABLE idem.records RENAME COLUMN awaited TO waited".to_owned(),
        ),
    ];
    raw.batch_execute("CREATE ROLE calls").await.unwrap();
    // The tables of a superuser can't be closed to it, so the session of the store becomes another role.
    let options = format!("{}?options=-c%20role%3Dcalls", server.url());
    raw.batch_execute("GRANT USAGE ON SCHEMA idem TO calls; GRANT SELECT, INSERT, UPDATE ON idem.records TO calls")
        .await
        .unwrap();
    for right in ["SELECT", "INSERT", "UPDATE"] {
        losses.push((
            format!("REVOKE {right} ON idem.records FROM calls"),
            format!("GRANT {right} ON idem.records TO calls"),
        ));
    }
    let calls = PostgresStore::connect(&options).await.unwrap();
    for (loss, remedy) in losses {
        let failed = async |key: &str| match calls.reserve(&request(&calls, &format!("{key} {loss}"))).await {
            Ok(Reservation::Granted { lease, .. }) => calls.finish(&lease, &done()).await.err(),
            other => Some(other.expect_err("a new key")),
        };
        assert!(failed("before").await.is_none(), "{loss}");
        assert!(calls.health().await.is_ready(), "before {loss}");
        raw.batch_execute(&loss).await.unwrap();
        let health = calls.health().await;
        assert_eq!(health.problems.iter().map(HealthProblem::axis).collect::<Vec<_>>(), ["schema"], "{loss}: {health}");
        // The ping sees what a call sees.
        let error = failed("after").await.expect("the call fails, too");
        assert_eq!(error.kind(), StoreErrorKind::Misconfigured, "{loss}: {error}");
        raw.batch_execute(&remedy).await.unwrap();
    }
    calls.ping().await.unwrap();
}

#[tokio::test]
async fn a_read_only_server_is_refused_until_it_allows_writes() {
    let server = PostgresServer::start();
    let (store, raw) = (connect(&server.url()).await, server.raw().await);
    reserved(&store, "before").await;
    let read_only = async |value: &str| {
        raw.batch_execute(&format!("ALTER SYSTEM SET default_transaction_read_only = {value}")).await.unwrap();
        raw.batch_execute("SELECT pg_reload_conf()").await.unwrap();
        until(&raw, &format!("SELECT current_setting('default_transaction_read_only') = '{value}'")).await;
    };
    read_only("on").await;
    // Sessions notice the new setting one after the other.
    let error = loop {
        match store.reserve(&request(&store, "during")).await {
            Err(error) => break error,
            Ok(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    };
    assert_eq!(error.kind(), StoreErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("read-only"), "{error}");
    assert_eq!(kind(options().connect(&server.url()).await), StoreErrorKind::Misconfigured);
    let reader = PostgresStore::options().read_only().connect(&server.url()).await.unwrap();
    reader.ping().await.expect("a store that only reads can be pinged");
    read_only("off").await;
    loop {
        match store.reserve(&request(&store, "after")).await {
            Ok(Reservation::Granted { .. }) => break,
            Ok(other) => panic!("{other:?}"),
            Err(error) => assert!(error.is_transient(), "{error}"),
        }
    }
}

#[tokio::test]
async fn an_operation_that_the_server_refuses_fails_no_other_operation() {
    let (store, raw, table) = open().await;
    let schema = table.trim_end_matches(".records");
    raw.batch_execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF NEW.key LIKE '%bad%' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {schema}.refuse()"
    ))
    .await
    .unwrap();
    let runs = AtomicU32::new(0);
    let names: Vec<_> = (0..64).map(|n| if n == 40 { "bad".to_owned() } else { format!("k{n}") }).collect();
    let calls = join_all(names.iter().map(|name| call(&store, name, &runs))).await;
    for (name, (result, _)) in names.iter().zip(calls) {
        assert_eq!(result.is_ok(), name != "bad", "{name}: {result:?}");
    }
    assert_eq!(runs.into_inner(), 63);
}

#[tokio::test]
async fn an_end_that_its_batch_has_written_is_not_reported_as_unwritten() {
    // A cancelled statement, a locked row, and a value that one operation of the batch may have caused.
    for code in ["57014", "55P03", "54000"] {
        ends_in_two_statements(code).await;
    }
}

/// Sends a batch of ends of which the second statement fails with this error.
async fn ends_in_two_statements(code: &str) {
    let (store, raw, table) = open().await;
    let schema = table.trim_end_matches(".records");
    // The server undoes that statement only.
    raw.batch_execute(&format!(
        "CREATE FUNCTION {schema}.cancel() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
         IF NEW.key LIKE '%cancelled%' THEN RAISE 'cancelled' USING ERRCODE = '{code}'; END IF; RETURN NEW; END $$; \
         CREATE TRIGGER cancel BEFORE UPDATE ON {table} FOR EACH ROW EXECUTE FUNCTION {schema}.cancel()"
    ))
    .await
    .unwrap();
    let [first, written, cancelled] =
        [reserved(&store, "first").await, reserved(&store, "written").await, reserved(&store, "cancelled").await];
    let mut foreign = cancelled.clone();
    foreign.owner = store.context().new_owner();
    // Two ends for one key are two statements, and the second one fails.
    let finish = done();
    let ends = join_all([&first, &written, &foreign, &cancelled].map(|lease| store.finish(lease, &finish))).await;
    let recorded = store.inspect(&written.key).await.unwrap().unwrap();
    assert!(recorded.record.is_finished(), "the first statement of the batch was written");
    let [_, ended, ..] = &ends[..] else { panic!("{ends:?}") };
    assert!(
        ended.as_ref().is_ok_and(|it| *it == Verdict::Applied)
            || ended.as_ref().is_err_and(StoreError::may_have_landed),
        "{code}: {ended:?}"
    );
}

/// The server speaks TLS. Its certificate is trusted only by a process whose environment names the certificate.
#[test]
fn a_store_refuses_a_server_with_an_untrusted_certificate() {
    let mut server = PostgresServer::start();
    let certificate = Certificate::new();
    let both = [certificate.file(), certificate.key()].map(|file| std::fs::read(file).unwrap()).concat();
    server.file("data/both.pem", &both);
    let args = ["ssl=on", "ssl_cert_file=both.pem", "ssl_key_file=both.pem"];
    server.kill();
    server.set(&args);
    server.run();
    tokio::runtime::Runtime::new().unwrap().block_on(async { drop(connect(&server.url()).await) });
    let race = |mode: &str, trusted: bool| {
        let url = format!("postgres://postgres@localhost:{}/postgres?sslmode={mode}", server.port());
        certificate.race(env!("CARGO_BIN_EXE_racer"), format!("postgres {url} idem"), server.folder(), trusted)
    };
    let refused = race("require", false);
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("ertificate") && said.contains("Misconfigured"), "{said}");
    for mode in ["require", "verify-full"] {
        let trusting = race(mode, true);
        assert!(trusting.status.success(), "{}", String::from_utf8_lossy(&trusting.stderr));
    }
}

// Faults.

#[tokio::test]
async fn a_write_whose_answer_got_lost_is_recognised() {
    for line in [Line::LoseReplies, Line::ResetOnReply, Line::LoseRequests] {
        let (url, schema) = shared_schema();
        let proxy = Proxy::to(shared().0).await;
        let options = options().schema(&schema).response_timeout(Duration::from_millis(1500));
        let store = options.connect(&url.replace(&shared().0.to_string(), &proxy.port().to_string())).await.unwrap();
        // Prepares the statements on the store's only connection.
        let warmed = AtomicU32::new(0);
        let warm = async || {
            let name = format!("warm{}", warmed.fetch_add(1, Ordering::Relaxed));
            let lease = wins(&store, &request(&store, &name)).await;
            assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
            lease.key
        };
        let key = warm().await;
        let lands = line != Line::LoseRequests;
        let direct = PostgresStore::options().schema(&schema).connect(&url).await.unwrap();
        // The line may also have broken an idle connection, whose next request gets an error and is repeated.
        let heals = async || {
            proxy.set(Line::Pass);
            while store.inspect(&key).await.is_err() {}
            warm().await;
        };

        // The answer to a reservation gets lost. The repeated reservation returns the same lease.
        let asked = request(&store, "k");
        proxy.set(line);
        assert_eq!(kind(store.reserve(&asked).await), StoreErrorKind::Unconfirmed, "{line:?}");
        assert_eq!(direct.inspect(&asked.key).await.unwrap().is_some(), lands, "{line:?}");
        heals().await;
        let lease = wins(&store, &asked).await;
        assert_eq!(lease.attempt, 1, "the repeated reservation is recognised");

        // The answer to a completion gets lost. The repeated completion is applied.
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
    let (url, schema) = shared_schema();
    let proxy = Proxy::to(shared().0).await;
    let options = options().schema(&schema).response_timeout(Duration::from_millis(300));
    let store = options.connect(&url.replace(&shared().0.to_string(), &proxy.port().to_string())).await.unwrap();
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
    let server = PostgresServer::start();
    let (store, raw) = (connect(&server.url()).await, server.raw().await);
    let runs = AtomicU32::new(0);
    for round in 0..10 {
        let ends = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = 'idem'";
        let names: Vec<_> = (0..20).map(|n| format!("k{round}:{n}")).collect();
        let calls = join_all(names.iter().map(async |name| {
            // The engine repeats requests that may be repeated. If a call still fails, its message is delivered again.
            while call(&store, name, &runs).await.0.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }));
        let ended = async {
            for _ in 0..3 {
                number(&raw, ends).await;
            }
        };
        tokio::join!(calls, ended);
    }
    assert_eq!(runs.into_inner(), 200, "every body ran once");
}

#[tokio::test]
async fn operations_succeed_while_the_pooler_restarts() {
    let server = PostgresServer::start();
    let mut pooler = PgBouncer::start(server.port());
    let options = options().behind_pgbouncer().response_timeout(Duration::from_secs(1));
    let store = options.connect(&pooler.url()).await.unwrap();
    let (runs, done, over) = (AtomicU32::new(0), AtomicU32::new(0), AtomicBool::new(false));
    let work = join_all((0..8).map(async |task| {
        let mut n = 0;
        while !over.load(Ordering::Relaxed) {
            while call(&store, &format!("k{task}:{n}"), &runs).await.0.is_err() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            n += 1;
            done.fetch_add(1, Ordering::Relaxed);
        }
    }));
    let restarts = async {
        for restart in 1..=4 {
            while done.load(Ordering::Relaxed) < 20 * restart {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            pooler.kill();
            pooler.run();
        }
        over.store(true, Ordering::Relaxed);
    };
    tokio::join!(work, restarts);
    assert_eq!(runs.into_inner(), done.into_inner(), "every body ran once");
}

#[tokio::test]
async fn the_error_of_a_pooler_names_the_missing_option() {
    let server = PostgresServer::start();
    connect(&server.url()).await;
    let pooler = PgBouncer::start(server.port());
    // PgBouncer refuses unknown session settings when a client connects.
    let error = PostgresStore::connect(&pooler.url()).await.unwrap_err();
    assert!(error.to_string().contains("behind_pgbouncer"), "{error}");
}

// Requests that hang, next to requests that do not.

/// Opens a transaction of another session that locks the row of `name`.
async fn lock_row(url: &str, table: &str, name: &str) -> Client {
    let client = raw(url).await;
    client.batch_execute("BEGIN").await.unwrap();
    client.batch_execute(&format!("SELECT FROM {table} WHERE key = '1/test/{name}' FOR UPDATE")).await.unwrap();
    client
}

/// Renews `leases`. Returns the answer for each lease (`None` if the store gave no answer) and the result of the call.
async fn answers(store: &dyn Store, leases: &[Lease]) -> (Vec<Option<Verdict>>, Result<(), StoreError>) {
    let answers = Mutex::new(vec![None; leases.len()]);
    let renewed = store.renew(leases, &|at, write| answers.lock().unwrap()[at] = Some(write)).await;
    (answers.into_inner().unwrap(), renewed)
}

/// Awaits `work`, and panics if a statement waits for a lock meanwhile.
async fn without_waiting<T>(url: &str, work: impl Future<Output = T>) -> T {
    let raw = raw(url).await;
    let watch = async {
        loop {
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'idem%' \
                         AND wait_event_type = 'Lock'";
            assert_eq!(number(&raw, waits).await, 0, "a statement waits for a lock");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = watch => unreachable!("the watching future never ends"),
    }
}

#[tokio::test]
async fn a_locked_record_costs_no_other_lease() {
    for partitions in [0, 4] {
        renews_all_but_the_locked(partitions).await;
    }
}

async fn renews_all_but_the_locked(partitions: u16) {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let url = server.url();
    let store = options().partitions(partitions).connect(&url).await.unwrap();
    let leases = join_all((0..6).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
    let gone = reserved(&store, "gone").await;
    assert_eq!(store.release(&gone, Release::Returned).await.unwrap(), Verdict::Applied);
    let leases: Vec<Lease> = leases.into_iter().chain([gone]).collect();
    let holder = lock_row(&url, "idem.records", "k2").await;
    for store in [store.handle(), store.upkeep()] {
        // A row keeps the transaction id of its last lock (`xmax`), and the statement of a renewal treats such rows
        // differently. So the renewal runs twice.
        for _ in 0..2 {
            let (said, renewed) = without_waiting(&url, answers(&*store, &leases)).await;
            let expected: Vec<_> = (0..7)
                .map(|n| match n {
                    2 => None,
                    6 => Some(Verdict::Refused),
                    _ => Some(Verdict::Applied),
                })
                .collect();
            assert_eq!(said, expected, "the lease of a locked row is neither confirmed nor lost");
            assert_eq!(kind(renewed), StoreErrorKind::Unavailable);
        }
    }
    holder.batch_execute("COMMIT").await.unwrap();
    for _ in 0..2 {
        let renewed = renew_all(&store, &leases[..6]).await.unwrap();
        assert!(renewed.iter().all(|write| *write == Verdict::Applied), "{renewed:?}");
    }
}

#[tokio::test]
async fn rows_with_the_same_ctid_in_two_partitions_are_distinguished() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let url = server.url();
    let store = options().partitions(8).connect(&url).await.unwrap();
    let leases = join_all((0..16).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
    let same = "SELECT a.key, b.key FROM idem.records a JOIN idem.records b ON a.ctid = b.ctid AND a.tableoid <> b.tableoid LIMIT 1";
    let row = server.raw().await.query_one(same, &[]).await.unwrap();
    let [locked, free] = [0, 1].map(|at| {
        let key: &str = row.get(at);
        leases.iter().find(|lease| lease.key.as_str() == key).unwrap().clone()
    });
    let name = |lease: &Lease| lease.key.as_str().trim_start_matches("1/test/").to_owned();
    // The lock of an ended transaction leaves its id in the row of `free` (`xmax`). A renewal must first lock such a
    // row, and must not take the locked row with the same `ctid` for it.
    lock_row(&url, "idem.records", &name(&free)).await.batch_execute("COMMIT").await.unwrap();
    let holder = lock_row(&url, "idem.records", &name(&locked)).await;
    let (said, renewed) = without_waiting(&url, answers(&store, &[locked, free])).await;
    assert_eq!(said, [None, Some(Verdict::Applied)]);
    assert_eq!(kind(renewed), StoreErrorKind::Unavailable);
    holder.batch_execute("COMMIT").await.unwrap();
}

#[tokio::test]
async fn handlers_keep_their_leases_while_the_record_of_another_handler_is_locked() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let (store, url) = (connect(&server.url()).await, server.url());
    let lease = Duration::from_millis(900);
    let policy = POLICY.lease(lease);
    let entered = tokio::sync::Barrier::new(7);
    let gate = tokio::sync::Semaphore::new(0);
    let handlers = join_all((0..6).map(async |n| {
        let key = Ok::<_, idem_runtime::key::KeyError>(Key::new("test", format!("k{n}")).unwrap());
        let body = async {
            entered.wait().await;
            gate.acquire().await.unwrap().forget();
            Ok::<u32, Error>(n)
        };
        Operation::new(&store, key, policy).run(body).await
    }));
    let locking = async {
        entered.wait().await;
        let holder = lock_row(&url, "idem.records", "k0").await;
        tokio::time::sleep(lease * 3).await;
        let held = "SELECT count(*) FROM idem.records WHERE state = 'pending' AND attempt = 1 AND lapses_at > clock_timestamp()";
        assert_eq!(number(&server.raw().await, held).await, 5);
        holder.batch_execute("COMMIT").await.unwrap();
        gate.add_permits(6);
    };
    let (results, ()) = tokio::join!(handlers, locking);
    for (n, result) in results.into_iter().enumerate() {
        assert_eq!(
            result.unwrap() as usize,
            n,
            "no attempt took over, so the result under the locked row may also be recorded"
        );
    }
}

#[tokio::test]
async fn a_locked_record_delays_no_write_of_another_record() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let (store, url) = (connect(&server.url()).await, server.url());
    let leases = join_all((0..64).map(async |n| reserved(&store, &format!("k{n}")).await)).await;
    let lapsed = |name: &str| request(&store, name).lease(Duration::from_millis(100));
    wins(&store, &lapsed("lapsed")).await;
    let holder = lock_row(&url, "idem.records", "k7").await;
    let other = lock_row(&url, "idem.records", "lapsed").await;
    let raw = server.raw().await;
    until(&raw, "SELECT lapses_at < clock_timestamp() FROM idem.records WHERE key = '1/test/lapsed'").await;
    without_waiting(&url, async {
        let steps = journal(20);
        let written = join_all(leases.iter().map(|lease| store.append(lease, &steps))).await;
        for (n, written) in written.into_iter().enumerate() {
            match n {
                7 => assert_eq!(kind(written), StoreErrorKind::Unavailable),
                _ => assert_eq!(written.unwrap(), Verdict::Applied),
            }
        }
        let ended = join_all(leases.iter().map(async |lease| store.finish(lease, &done()).await)).await;
        for (n, ended) in ended.into_iter().enumerate() {
            match n {
                7 => assert_eq!(kind(ended), StoreErrorKind::Unavailable),
                _ => assert_eq!(ended.unwrap(), Verdict::Applied),
            }
        }
        assert_eq!(kind(store.release(&leases[7], Release::Returned).await), StoreErrorKind::Unavailable);
        assert_eq!(kind(store.reserve(&request(&store, "lapsed")).await), StoreErrorKind::Unavailable);
        // A waiter that can't mark the locked row polls instead.
        store.wait(&leases[7].key, 1, Duration::from_millis(1)).await.unwrap();
    })
    .await;
    for holder in [holder, other] {
        holder.batch_execute("ROLLBACK").await.unwrap();
    }
    assert_eq!(store.finish(&leases[7], &done()).await.unwrap(), Verdict::Applied);
    assert_eq!(reserved(&store, "lapsed").await.attempt, 2);
}

#[tokio::test]
async fn operations_wait_for_a_locked_record_only_for_a_limited_time() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    let lease = reserved(&store, "k").await;
    let _holder = lock_row(&server.url(), "idem.records", "k").await;
    let mut counter = Counter::new(&server);
    assert_eq!(kind(store.finish(&lease, &done()).await), StoreErrorKind::Unavailable);
    let asked = counter.count();
    assert!(asked <= 40, "{asked} statements for an operation that could not succeed");
}

/// Inserts `name` in an open transaction, so that reservations of this key wait for the transaction.
async fn make_row(url: &str, table: &str, name: &str) -> Client {
    let client = raw(url).await;
    client.batch_execute("BEGIN").await.unwrap();
    let row = "owner, format, state, attempt, attempts_used, on_crash_fail, lease_ms, ttl_ms, lapses_at, expires_at, listed_at, \
               first_seen_at, began_at";
    let values = "'\\x00112233445566778899aabbccddeeff', 1, 'pending', 1, 1, false, 1000, 1000, now(), now(), now(), now(), now()";
    client
        .batch_execute(&format!("INSERT INTO {table} (key, {row}) VALUES ('1/test/{name}', {values})"))
        .await
        .unwrap();
    client
}

#[tokio::test]
async fn a_dropped_operation_is_not_sent() {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).pool_size(1).connect(&url).await.unwrap();
    let (raw, table) = (raw(&url).await, format!("{}.records", quoted(&schema)));
    let ended = join_all((0..10).map(async |n| reserved(&store, &format!("ended{n}")).await)).await;
    let running = join_all((0..10).map(async |n| reserved(&store, &format!("running{n}")).await)).await;
    let (finish, steps) = (done(), journal(20));
    let names = async || -> Vec<String> {
        let rows = raw.query(&format!("SELECT key FROM {table} WHERE key LIKE '%gone%'"), &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    // At first the store inserts a record without reading; after many replays the store reads before it inserts.
    for replays in [false, true] {
        if replays {
            let runs = AtomicU32::new(0);
            join_all((0..300).map(async |_| call(&store, "again", &runs).await)).await;
            for _ in 0..100 {
                call(&store, "again", &runs).await.0.unwrap();
            }
        }
        let name = format!("made{replays}");
        let holder = make_row(&url, &table, &name).await;
        let mut stuck = Box::pin({
            let store = store.clone();
            async move { store.reserve(&request(&store, &name)).await }
        });
        // The store's only connection waits for the open transaction.
        let waits = format!(
            "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{}%'",
            schema.replace('"', "\"\"")
        );
        tokio::select! {
            _ = &mut stuck => panic!("the call must wait for a connection"),
            () = until(&raw, &waits) => {}
        }
        // The statement on the only connection waits. Further reservations, journals and completions queue behind it,
        // and their callers are dropped.
        let requests: Vec<ReserveRequest> = (0..10).map(|n| request(&store, &format!("gone{replays}{n}"))).collect();
        let mut calls: Vec<_> = requests.iter().map(|request| Box::pin(store.reserve(request))).collect();
        let writes = running.iter().map(|lease| store.append(lease, &steps));
        let ends = ended.iter().map(|lease| store.finish(lease, &finish));
        let mut writes: Vec<_> = writes.chain(ends).map(Box::pin).collect();
        for call in &mut calls {
            assert!(poll_once(call.as_mut()).await.is_pending());
        }
        for write in &mut writes {
            assert!(poll_once(write.as_mut()).await.is_pending());
        }
        drop((calls, writes));
        holder.batch_execute("ROLLBACK").await.unwrap();
        stuck.await.unwrap();
        // Answers to these requests show that the lanes have handled all earlier ones.
        let after = join_all((0..10).map(async |n| reserved(&store, &format!("after{replays}{n}")).await)).await;
        for written in join_all(after.iter().map(|lease| store.append(lease, &steps))).await {
            assert_eq!(written.unwrap(), Verdict::Applied);
        }
        let journals = format!("SELECT count(*) FROM {table} WHERE result IS NOT NULL AND key LIKE '%running%'");
        assert_eq!(number(&raw, &journals).await, 0, "journals whose callers had gone are never sent");
        assert_eq!(names().await, Vec::<String>::new(), "calls whose callers had gone are never sent");
        until(&raw, &format!("SELECT count(*) = 10 FROM {table} WHERE state = 'completed' AND key LIKE '%ended%'"))
            .await;
    }
}

#[tokio::test]
async fn a_dropped_operation_is_not_sent_in_a_second_exchange() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let proxy = Proxy::to(server.port()).await;
    connect(&server.url()).await;
    let url = server.url().replace(&server.port().to_string(), &proxy.port().to_string());
    let store = PostgresStore::connect(&url).await.unwrap();
    let runs = AtomicU32::new(0);
    // After many replays, both in batches and alone, every connection has prepared its statements.
    for _ in 0..20 {
        join_all((0..20).map(async |n| call(&store, &format!("again{n}"), &runs).await)).await;
    }
    let mut counter = Counter::new(&server);
    proxy.set(Line::Delay(Duration::from_millis(200)));
    let requests: Vec<ReserveRequest> = (0..10).map(|n| request(&store, &format!("gone{n}"))).collect();
    let mut calls: Vec<_> = requests.iter().map(|request| Box::pin(store.reserve(request))).collect();
    // Polls the calls until the server has received the store's look-up of their keys. The answer is still under way.
    while counter.count() == 0 {
        for call in &mut calls {
            assert!(poll_once(call.as_mut()).await.is_pending());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(calls);
    // The answers to these calls show that the store has handled all earlier requests.
    for n in 0..3 {
        assert!(call(&store, &format!("again{n}"), &runs).await.1.replayed());
    }
    assert_eq!(number(&server.raw().await, "SELECT count(*) FROM idem.records WHERE key LIKE '%gone%'").await, 0);
}

#[tokio::test]
async fn an_uncommitted_key_delays_other_keys_only_once() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let (store, url) = (connect(&server.url()).await, server.url());
    let holder = make_row(&url, "idem.records", "made").await;
    let together = async |round: u32| {
        let names: Vec<_> = (0..32).map(|n| if n == 9 { "made".into() } else { format!("k{round}:{n}") }).collect();
        let answers = join_all(names.iter().map(async |name| store.reserve(&request(&store, name)).await)).await;
        for (n, answer) in answers.into_iter().enumerate() {
            match n {
                9 => assert_eq!(kind(answer), StoreErrorKind::Unavailable),
                _ => assert!(matches!(answer, Ok(Reservation::Granted { .. })), "{answer:?}"),
            }
        }
    };
    together(0).await;
    // The store now reserves this key in a statement of its own, so that no other key waits with this key.
    let raw = raw(&url).await;
    let watch = async {
        loop {
            let waits = "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'idem%' \
                         AND wait_event_type = 'Lock' AND query LIKE '%unnest%'";
            assert_eq!(number(&raw, waits).await, 0, "other calls wait with the stuck call");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        () = together(1) => {}
        () = watch => unreachable!("the watching future never ends"),
    }
    holder.batch_execute("ROLLBACK").await.unwrap();
}

// Runtimes, threads and processes.

fn one_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs every operation of the store, for keys that begin with `name`.
async fn everything(store: &PostgresStore, name: &str) {
    let names: Vec<_> = (0..20).map(|n| format!("{name}:{n}")).collect();
    let leases = join_all(names.iter().map(async |name| reserved(store, name).await)).await;
    let steps = journal(20);
    for written in join_all(leases.iter().map(|lease| store.append(lease, &steps))).await {
        assert_eq!(written.unwrap(), Verdict::Applied);
    }
    assert!(renew_all(&*store.upkeep(), &leases).await.unwrap().iter().all(|write| *write == Verdict::Applied));
    assert!(renew_all(store, &leases).await.unwrap().iter().all(|write| *write == Verdict::Applied));
    let waiting = async { store.wait(&leases[0].key, 1, Duration::from_secs(30)).await.unwrap() };
    let ends = join_all(leases.iter().map(async |lease| {
        assert_eq!(store.upkeep().finish(lease, &done()).await.unwrap(), Verdict::Applied);
    }));
    tokio::join!(waiting, ends);
    let runs = AtomicU32::new(0);
    assert!(call(store, &names[0], &runs).await.1.replayed());
    assert!(store.inspect(&leases[1].key).await.unwrap().is_some());
    let finished = store.inspect(&leases[3].key).await.unwrap().unwrap();
    let mark = Decision::mark_sent(&leases[3].key, &finished, None);
    assert_eq!(store.decide(&mark).await.unwrap(), DecisionAnswer::Applied);
    assert_eq!(store.reopen(&leases[2].key, 1).await.unwrap(), Verdict::Applied);
    store.purge(1).await.unwrap();
}

#[test]
fn a_handle_works_although_the_runtime_that_connected_is_gone_or_idle() {
    let (url, schema) = shared_schema();
    let url = url.as_str();
    let options = || options().schema(&schema).response_timeout(Duration::from_secs(2));
    let like = || {
        let config: tokio_postgres::Config = url.parse().unwrap();
        deadpool_postgres::Pool::builder(deadpool_postgres::Manager::new(config, NoTls)).build().unwrap()
    };
    for (case, idle, own_pool) in [("idle", true, false), ("gone", false, false), ("gone, own pool", false, true)] {
        let first = one_thread();
        let store = first.block_on(async {
            let store = match own_pool {
                true => options().connect_with(like()).await.unwrap(),
                false => options().connect(url).await.unwrap(),
            };
            everything(&store, &format!("{case} first")).await;
            store
        });
        let first = idle.then_some(first);
        one_thread().block_on(everything(&store, &format!("{case} second")));
        // Several runtimes use the handle concurrently, and one after the other.
        std::thread::scope(|scope| {
            for n in 0..3 {
                let store = &store;
                scope.spawn(move || one_thread().block_on(everything(store, &format!("{case} third {n}"))));
            }
        });
        if let Some(first) = first {
            first.block_on(everything(&store, &format!("{case} again")));
        }
    }
}

#[test]
fn renewals_have_connections_and_a_runtime_of_their_own() {
    let server = PostgresServer::start_with(&["fsync=off"]);
    let calls = one_thread();
    let store = calls.block_on(async { options().pool_size(1).connect(&server.url()).await.unwrap() });
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'idem-upkeep'";
    let aside = one_thread();
    let raw = aside.block_on(server.raw());
    let count = || aside.block_on(number(&raw, connections));
    let (lease, stuck) =
        calls.block_on(async { (reserved(&store, "k").await, make_row(&server.url(), "idem.records", "stuck").await) });
    assert_eq!(count(), 0, "the connection is opened at its first use");
    // The runtime of the calls stands still during a statement on its only connection.
    calls.block_on(async {
        let request = request(&store, "stuck");
        let mut asked = std::pin::pin!(store.reserve(&request));
        let waits = "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock'";
        tokio::select! {
            _ = &mut asked => panic!("the call must wait for a connection"),
            () = async { until(&server.raw().await, waits).await } => {}
        }
        let leases = vec![lease.clone(); 1];
        // Meanwhile the handle for upkeep, on another thread, renews leases and finishes attempts.
        let upkeep = store.upkeep();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                one_thread().block_on(async {
                    for _ in 0..10 {
                        assert_eq!(renew_all(&*upkeep, &leases).await.unwrap(), [Verdict::Applied]);
                    }
                    assert_eq!(upkeep.finish(&leases[0], &done()).await.unwrap(), Verdict::Applied);
                    assert!(Arc::ptr_eq(&upkeep, &upkeep.upkeep()) || upkeep.upkeep().name() == upkeep.name());
                });
            });
        });
    });
    // Many renewals and releases use at most two connections for upkeep.
    let many: Vec<Lease> = calls.block_on(async {
        stuck.batch_execute("ROLLBACK").await.unwrap();
        join_all((0..2000).map(|n| {
            let store = store.clone();
            async move { reserved(&store, &format!("many{n}")).await }
        }))
        .await
    });
    assert!(std::ptr::eq(store.context(), store.upkeep().context()), "the same leases");
    let one = one_thread();
    one.block_on(async {
        let upkeep = store.upkeep();
        let renewing = join_all((0..10).map(async |_| renew_all(&*upkeep, &many).await.unwrap()));
        let ending = join_all((0..100).map(async |n| upkeep.release(&many[n], Release::Returned).await.unwrap()));
        tokio::join!(renewing, ending);
        let count = number(&server.raw().await, connections).await;
        assert!((1..=2).contains(&count), "{count} connections");
    });
}

/// A forked child inherits the connections of its parent, and must not use them.
#[test]
fn a_forked_child_opens_its_own_sessions_and_does_not_use_those_of_its_parent() {
    const URL: &str = "IDEM_TEST_FORKS_AT";
    // The test runs itself in another process, so that no other test runs during the fork.
    let Ok(url) = std::env::var(URL) else {
        let server = PostgresServer::start_with(&["fsync=off"]);
        let mut this = Command::new(std::env::current_exe().unwrap());
        let name = "a_forked_child_opens_its_own_sessions_and_does_not_use_those_of_its_parent";
        let output = this.args([name, "--exact", "--test-threads", "1"]).env(URL, server.url()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return;
    };
    let runtime = one_thread();
    let store = runtime.block_on(async {
        let store = options().purge_every(Duration::from_millis(20)).connect(&url).await.unwrap();
        everything(&store, "before").await;
        store
    });
    let sessions = async || -> Vec<i32> {
        let pids = "SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'idem%' ORDER BY pid";
        raw(&url).await.query(pids, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
    };
    let before = runtime.block_on(sessions());
    assert!(before.len() >= 3, "connections for calls, for notifications and for renewals: {before:?}");
    let held = runtime.block_on(reserved(&store, "held"));
    match fork::fork().unwrap() {
        fork::Fork::Child => {
            // The child must not use the runtime of its parent; a drop would use it.
            std::mem::forget(runtime);
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                one_thread().block_on(everything(&store, "child"));
                let policy = POLICY.lease(Duration::from_millis(300));
                // The child's handler outlives its first lease, so it needs heartbeats from the library's thread.
                one_thread().block_on(async {
                    let body = async {
                        tokio::time::sleep(Duration::from_millis(900)).await;
                        Ok::<u32, Error>(1)
                    };
                    let operation = Operation::new(&store, Key::new("test", "beats"), policy);
                    operation.run(body).await.unwrap();
                });
                drop(store);
            }));
            std::process::exit(i32::from(done.is_err()));
        }
        fork::Fork::Parent(child) => {
            let status = fork::waitpid(child).unwrap();
            assert!(fork::WIFEXITED(status) && fork::WEXITSTATUS(status) == 0, "the child failed: {status}");
            // The parent's sessions must survive the end of the child, and its lease must still be held.
            let after = runtime.block_on(sessions());
            assert!(before.iter().all(|pid| after.contains(pid)), "{before:?} before the fork, {after:?} after it");
            runtime.block_on(async {
                assert_eq!(renew_all(&store, std::slice::from_ref(&held)).await.unwrap(), [Verdict::Applied]);
                everything(&store, "after").await;
                let key = Key::new("test", "beats").unwrap();
                assert!(store.inspect(&key).await.unwrap().unwrap().record.is_finished());
            });
            let after = runtime.block_on(sessions());
            assert!(before.iter().all(|pid| after.contains(pid)), "{before:?} before the fork, {after:?} in the end");
        }
    }
}

// Long answers and slow lines.

#[tokio::test]
async fn a_slow_connection_that_makes_progress_is_kept() {
    let (url, schema) = shared_schema();
    let proxy = Proxy::to(shared().0).await;
    let timeout = Duration::from_millis(800);
    let store = options().schema(&schema).response_timeout(timeout);
    let store = store.connect(&url.replace(&shared().0.to_string(), &proxy.port().to_string())).await.unwrap();
    let bytes: Vec<u8> = (0..1 << 20).map(|n: u32| b'a' + (n.wrapping_mul(2_654_435_761) >> 27) as u8 % 26).collect();
    let large = Finish::Completed(StoredResult::Encoded { codec: CodecName::of::<Json>(), bytes: bytes.into() });
    let lease = reserved(&store, "k").await;
    // The write of the result takes longer than the time limit.
    proxy.set(Line::Slow(800_000));
    assert_eq!(store.finish(&lease, &large).await.unwrap(), Verdict::Applied);
    // Each read takes longer than the time limit, because all connections share the slow line.
    proxy.set(Line::Slow(4_000_000));
    // There are more requests than connections. First each request is sent alone, and then all of them in one batch.
    for _ in 0..2 {
        let requests: Vec<_> = (0..12).map(|_| request(&store, "k")).collect();
        for answer in join_all(requests.iter().map(|request| store.reserve(request))).await {
            match answer {
                Ok(Reservation::Finished { record, .. }) => assert_eq!(record.state, large.state()),
                other => panic!("{other:?}"),
            }
        }
    }
    // A connection that delivers no bytes is given up.
    proxy.set(Line::Pass);
    assert!(store.inspect(&lease.key).await.unwrap().is_some());
    proxy.set(Line::LoseReplies);
    assert_eq!(kind(store.inspect(&lease.key).await), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn a_statement_for_many_replays_leaves_large_results_out() {
    let server = PostgresServer::start_with(&["log_statement=all", "fsync=off"]);
    let store = connect(&server.url()).await;
    let sizes = [0, 1, 4096, 4097, 100_000];
    let names: Vec<String> = (0..40).map(|n| format!("k{n}")).collect();
    for (n, name) in names.iter().enumerate() {
        let lease = reserved(&store, name).await;
        assert_eq!(store.finish(&lease, &of_size(sizes[n % 5])).await.unwrap(), Verdict::Applied);
    }
    for round in 0..20 {
        let mut counter = Counter::new(&server);
        let requests: Vec<_> = names.iter().map(|name| request(&store, name)).collect();
        let answers = join_all(requests.iter().map(|request| store.reserve(request))).await;
        for (n, answer) in answers.into_iter().enumerate() {
            match answer {
                Ok(Reservation::Finished { record, .. }) => {
                    assert_eq!(record.state, of_size(sizes[n % 5]).state(), "{n}");
                }
                other => panic!("{other:?}"),
            }
        }
        let asked = counter.count();
        assert!((16..30).contains(&asked), "round {round}: {asked} statements for 16 large results and 24 others");
    }
}

// Several connections and processes.

/// Calls a handler that waits for the end of `lease`, and ends the lease once `is_waiting` is ready.
async fn waits(store: &PostgresStore, owner: &PostgresStore, lease: &Lease, is_waiting: impl Future<Output = ()>) {
    let policy = POLICY.in_progress(InProgress::Wait(LEASE));
    let operation = Operation::new(store, Ok::<_, idem_runtime::key::KeyError>(lease.key.clone()), policy);
    let body = async { panic!("only replays") };
    let duplicate = observe(operation.run::<u32, Error, _>(body));
    let finish = async {
        is_waiting.await;
        assert_eq!(owner.finish(lease, &done()).await.unwrap(), Verdict::Applied);
    };
    let ((result, outcome), ()) = tokio::join!(duplicate, finish);
    assert_eq!(result.unwrap(), 42);
    assert!(outcome.replayed());
}

#[tokio::test]
async fn a_waiter_of_another_process_is_woken() {
    let (url, schema) = shared_schema();
    let own = options().schema(&schema);
    let owner = own.clone().connect(&url).await.unwrap();
    let raw = raw(&url).await;
    let marked = format!("SELECT bool_or(waited) FROM {}.records WHERE state = 'pending'", quoted(&schema));
    let waiter = own.clone().connect(&url).await.unwrap();
    for n in 0..3 {
        let lease = reserved(&owner, &format!("k{n}")).await;
        waits(&waiter, &owner, &lease, until(&raw, &marked)).await;
    }
    // Behind a pooler a store can't listen, so its waiters poll.
    let (direct, pooler) = shared();
    let through = own.clone().behind_pgbouncer();
    let through = through.connect(&url.replace(&direct.to_string(), &pooler.to_string())).await.unwrap();
    let config: tokio_postgres::Config = url.parse().unwrap();
    let pool = deadpool_postgres::Pool::builder(deadpool_postgres::Manager::new(config, NoTls)).build().unwrap();
    for (n, waiter) in [through, own.connect_with(pool).await.unwrap()].iter().enumerate() {
        let lease = reserved(&owner, &format!("polled{n}")).await;
        waits(waiter, &owner, &lease, tokio::time::sleep(Duration::from_millis(100))).await;
    }
}

#[tokio::test]
async fn a_waiter_is_woken_after_its_connection_broke() {
    let server = PostgresServer::start();
    let (owner, waiter) = (connect(&server.url()).await, connect(&server.url()).await);
    let raw = server.raw().await;
    let lease = reserved(&owner, "k").await;
    let breaks = async {
        until(&raw, "SELECT bool_or(waited) FROM idem.records").await;
        // The waiter polls until the store listens again.
        let listening = "FROM pg_stat_activity WHERE query LIKE 'LISTEN%' AND state = 'idle'";
        until(&raw, &format!("SELECT count(*) = 1 {listening}")).await;
        let broken = number(&raw, &format!("SELECT pid::bigint {listening}")).await;
        assert_eq!(number(&raw, &format!("SELECT count(pg_terminate_backend({broken}))")).await, 1);
        until(&raw, &format!("SELECT count(*) = 1 {listening} AND pid <> {broken}")).await;
    };
    waits(&waiter, &owner, &lease, breaks).await;
}

#[tokio::test]
async fn the_end_of_an_attempt_without_waiters_sends_no_notification() {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).connect(&url).await.unwrap();
    let (client, mut connection) = tokio_postgres::connect(&url, NoTls).await.unwrap();
    let (sender, mut heard) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notification(notification) = message {
                sender.send(notification.payload().to_owned()).ok();
            }
        }
    });
    client.batch_execute(&format!("LISTEN {}", quoted(&format!("idem:{schema}")))).await.unwrap();
    let runs = AtomicU32::new(0);
    for n in 0..10 {
        call(&store, &format!("k{n}"), &runs).await.0.unwrap();
    }
    let lease = reserved(&store, "waited").await;
    store.wait(&lease.key, 1, Duration::from_millis(1)).await.unwrap();
    assert_eq!(store.finish(&lease, &done()).await.unwrap(), Verdict::Applied);
    assert_eq!(heard.recv().await.as_deref(), Some("1/test/waited"));
}

#[tokio::test]
async fn a_store_uses_a_pool_of_the_user() {
    let (url, schema) = shared_schema();
    let config: tokio_postgres::Config = url.parse().unwrap();
    let pool = deadpool_postgres::Pool::builder(deadpool_postgres::Manager::new(config, NoTls)).build().unwrap();
    let store = options().schema(&schema).connect_with(pool.clone()).await.unwrap();
    let runs = AtomicU32::new(0);
    for calls in join_all((0..50).map(|_| call(&store, "k", &runs))).await {
        assert!(matches!(calls.0, Ok(1) | Err(Error::InProgress { .. })), "{:?}", calls.0);
    }
    assert_eq!(call(&store, "k", &runs).await.0.unwrap(), 1);
    pool.get().await.unwrap().batch_execute("SELECT 1").await.expect("still usable");
    pool.close();
    assert_eq!(kind(store.reserve(&request(&store, "closed")).await), StoreErrorKind::Unavailable);
}

#[tokio::test]
async fn processes_race_for_the_same_keys() {
    let server = PostgresServer::start();
    connect(&server.url()).await;
    let spec = format!("postgres {} idem", server.url());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let effects = race.run(async {}).await;
    assert!(
        effects.repeated() <= race.kills,
        "only a killed process may leave an effect without a record: {effects:?}"
    );
}

#[tokio::test]
async fn processes_race_while_the_server_restarts() {
    let mut server = PostgresServer::start();
    connect(&server.url()).await;
    let spec = format!("postgres {} idem", server.url());
    let race = Race::new(env!("CARGO_BIN_EXE_racer"), &spec);
    let restarts = Arc::new(AtomicU32::new(0));
    let restarting = async {
        for _ in 0..3 {
            let raw = server.raw().await;
            let recorded = number(&raw, "SELECT count(*) FROM idem.records WHERE state = 'completed'").await;
            server.kill();
            server.run();
            if recorded < 1000 {
                restarts.fetch_add(1, Ordering::Relaxed);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let effects = race.run(restarting).await;
    let restarts = restarts.load(Ordering::Relaxed) as usize;
    assert!(restarts > 0, "the race was over before the first restart");
    // At each restart of the server, each process may leave one effect without a record.
    let bound = race.kills + restarts * (race.racers + 1);
    assert!(effects.repeated() <= bound, "{} repeated: {effects:?}", effects.repeated());
}

#[tokio::test]
async fn each_page_of_a_list_continues_after_the_rows_of_the_previous_page() {
    for partitions in [0, 4] {
        lists_page_by_page(partitions).await;
    }
}

async fn lists_page_by_page(partitions: u16) {
    let (store, raw, table) = open_with(partitions).await;
    // SQL that inserts rows of completed operations, and the row of an interrupted operation whose key sorts last.
    let rows = format!(
        "INSERT INTO {table} (key, owner, format, state, attempt, attempts_used, on_crash_fail, lapses_at, expires_at, \
         listed_at, first_seen_at, began_at) SELECT '1/test/' || lpad(n::text, 5, '0'), \
         '\\x00112233445566778899aabbccddeeff', 1, CASE WHEN n = 2099 THEN 'interrupted' ELSE 'completed' END, 1, 1, false, \
         now(), '2999-01-01', '2999-01-01', now(), now() FROM generate_series(0, 2099) AS n"
    );
    raw.batch_execute(&rows).await.unwrap();
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
    raw.batch_execute(&format!("UPDATE {table} SET owner = 'short' WHERE key = '1/test/00007'")).await.unwrap();
    let stats = store.operator().stats(&Filter::new(), u64::MAX).await.unwrap();
    assert_eq!((stats.total().total(), stats.total().of(Standing::Damaged), stats.unreadable), (2100, 1, 0));
}

#[tokio::test]
async fn readable_columns_show_the_holder_of_a_key() {
    let (url, schema) = shared_schema();
    let store = options().schema(&schema).holder("worker-7").connect(&url).await.unwrap();
    call(&store, "k", &AtomicU32::new(0)).await.0.unwrap();
    let key = idem_tests::calls::key("k");
    let found = store.inspect(&key).await.unwrap().expect("a record");
    let noted = Decision::discard(&key, &found).by("alice").reason("INC-7");
    assert_eq!(store.decide(&noted).await.unwrap(), DecisionAnswer::Applied);
    let sql = format!("SELECT holder, decided_by, decided_reason FROM {}.records", quoted(&schema));
    let row = raw(&url).await.query_one(&sql, &[]).await.unwrap();
    let columns: [&str; 3] = [0, 1, 2].map(|at| row.get(at));
    assert!(columns[0].ends_with(&format!("/{}/worker-7", std::process::id())), "{columns:?}");
    assert_eq!(columns[1..], ["alice", "INC-7"]);
    // Each column of the table must have a comment, for a person who reads the table.
    let sql = "SELECT count(*) FILTER (WHERE d.description IS NULL) FROM pg_attribute AS a LEFT JOIN pg_description AS d \
               ON d.objoid = a.attrelid AND d.objsubid = a.attnum WHERE a.attrelid = $1::text::regclass AND a.attnum > 0";
    let table = format!("{}.records", quoted(&schema));
    let undescribed: i64 = raw(&url).await.query_one(sql, &[&table]).await.unwrap().get(0);
    assert_eq!(undescribed, 0, "columns without a comment");
    store.ping().await.unwrap();
}

// Operations that need no record.

/// All rows of the tables of docs/natural.md.
async fn rows(raw: &Client) -> Vec<String> {
    let mut rows = Vec::new();
    for table in natural::TABLES {
        let query = format!("SELECT '{table}: ' || it::text FROM {table} AS it ORDER BY 1");
        rows.extend(raw.query(&query, &[]).await.unwrap().iter().map(|row| row.get::<_, String>(0)));
    }
    rows
}

#[tokio::test]
async fn the_statements_about_natural_idempotency_do_what_their_page_says() {
    let (url, schema) = shared_schema();
    let schema = quoted(&schema);
    let connected = async || {
        let raw = raw(&url).await;
        raw.batch_execute(&format!("SET search_path = {schema}")).await.unwrap();
        raw
    };
    raw(&url).await.batch_execute(&format!("CREATE SCHEMA {schema}")).await.unwrap();
    let raw = connected().await;
    let (tables, blocks) = natural::blocks();
    raw.batch_execute(tables).await.unwrap();
    for block in &blocks {
        let mut states = vec![rows(&raw).await];
        for _ in 0..2 {
            raw.batch_execute(block.sql).await.unwrap();
            states.push(rows(&raw).await);
        }
        assert_ne!(states[0], states[1], "the first run has an effect: {block:?}");
        assert_eq!(states[1] == states[2], block.is_idempotent, "{block:?}: {states:?}");
    }
    let prices = raw.query("SELECT article, cents FROM prices ORDER BY 1", &[]).await.unwrap();
    assert_eq!(prices.iter().map(|row| (row.get(0), row.get(1))).collect::<Vec<(i64, i64)>>(), natural::PRICES);
    assert_eq!(blocks.iter().filter(|block| block.is_idempotent).count(), 6);

    // Two deliveries of one event, with the statements of the function on the page.
    let insert = "INSERT INTO movements (event_id, customer, points) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
    let update = "UPDATE points SET balance = balance + $2 WHERE customer = $1";
    assert!(natural::PAGE.contains(insert) && natural::PAGE.contains(update));
    raw.batch_execute("UPDATE points SET balance = 0").await.unwrap();
    let (mut one, mut two) = (connected().await, connected().await);
    let first = one.transaction().await.unwrap();
    assert_eq!(first.execute(insert, &[&42_i64, &3_i64, &10_i64]).await.unwrap(), 1);
    let pid = number(&two, "SELECT pg_backend_pid()::bigint").await;
    let second = async {
        let second = two.transaction().await.unwrap();
        let inserted = second.execute(insert, &[&42_i64, &3_i64, &10_i64]).await.unwrap();
        second.commit().await.unwrap();
        inserted
    };
    let commits = async {
        until(&raw, &format!("SELECT cardinality(pg_blocking_pids({pid})) > 0")).await;
        first.execute(update, &[&3_i64, &10_i64]).await.unwrap();
        first.commit().await.unwrap();
    };
    assert_eq!(tokio::join!(second, commits).0, 0, "the second delivery waits for the first, and inserts nothing");
    assert_eq!(number(&raw, "SELECT balance FROM points").await, 10);
}
