//! Tests of the commands on real servers, and of the doctor's findings there.

use std::process::{Child, Stdio};

use idem_runtime::{DynamoStore, MySqlStore, NatsStore, PostgresStore, RedisStore, Store};
use idem_tests::cluster::{Cluster, Watched};
use idem_tests::dynamo::{self, Emulator};
use idem_tests::mysql::{self, MySqlServer};
use idem_tests::nats::{self, NatsServer};
use idem_tests::postgres::{self, PgBouncer, PostgresServer};
use idem_tests::server::{Kind, RedisServer, raw, until};
use idem_tests::sqlite::Folder;
use idem_tests::tls::Certificate;
use mysql_async::prelude::Queryable as _;
use serde_json::Value;

use super::support::{
    Records, Run, command, completed, doubtful, expired, file, idem_at, interrupted, revision, run, state,
};

/// Resolves a record of the store at `url`, as an operator on call does.
async fn settles(url: &str, store: &dyn Store) {
    let folder = Folder::new();
    let receipt = file(folder.path(), b"\"receipt\"");
    interrupted(store, "42").await;
    idem_at(url, &["show", "pay/42"]).ends(0).says("state        interrupted").says(store.context().name());
    let look = || revision(url, "pay/42");
    let seen = look();
    let resolve = ["resolve", "pay/42", "--seen", &seen, "--completed", receipt.to_str().unwrap(), "--yes"];
    for _ in 0..2 {
        idem_at(url, &resolve).ends(0);
    }
    let shown = idem_at(url, &["show", "pay/42", "--result", "--json"]).ends(0).json();
    assert_eq!((&shown["state"], &shown["result"]["text"]), (&Value::from("completed"), &Value::from("\"receipt\"")));
    idem_at(url, &["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(1).complains("nothing was changed");
    idem_at(url, &["discard", "pay/42", "--seen", &look(), "--yes"]).ends(0);
    assert_eq!(state(store, "42").await, Some("released"));
    let other = look().replacen('1', "2", 1);
    idem_at(url, &["forget", "pay/42", "--seen", &other, "--yes"]).ends(1).complains("the latest attempt is 1");
    idem_at(url, &["forget", "pay/42", "--seen", &look(), "--yes"]).ends(0);
    idem_at(url, &["show", "pay/42"]).ends(4);
    // A step in doubt gets its value.
    doubtful(store, "book").await;
    idem_at(url, &["show", "pay/book", "--steps"]).ends(0).says("step 2       book: in doubt since attempt 1");
    let seen = revision(url, "pay/book");
    let value = ["--step", "book", "--completed", receipt.to_str().unwrap()];
    let resolve = [&["resolve", "pay/book", "--seen", &seen, "--yes"], &value[..]].concat();
    idem_at(url, &resolve).ends(0).says("with step `book` ended with 9 bytes of json");
    idem_at(url, &["show", "pay/book", "--steps"]).ends(0).says("step 2       book: ended in attempt 1");
    idem_at(url, &["reopen", "pay/book", "--from", "book", "--seen", &revision(url, "pay/book"), "--yes"]).ends(0);
    let shown = idem_at(url, &["show", "pay/book", "--json"]).ends(0).json();
    assert_eq!((&shown["steps"], &shown["state"]), (&Value::from(1), &Value::from("released")));
    idem_at(url, &["forget", "pay/book", "--seen", &revision(url, "pay/book"), "--yes"]).ends(0);
    completed(store, "kept", b"1").await;
    idem_at(url, &["purge"]).ends(0);
    assert_eq!(state(store, "kept").await, Some("completed"));
    let scan: &[&str] = if ["redis", "nats", "dynamodb"].contains(&store.context().name()) { &["--scan"] } else { &[] };
    if !scan.is_empty() {
        for verb in ["list", "stats", "watch"] {
            idem_at(url, &[verb]).ends(1).complains("add --scan");
        }
    }
    let listed = idem_at(url, &[&["list", "--json", "--state", "completed"], scan].concat()).ends(0).json();
    assert_eq!((&listed["key"], &listed["store"]), (&Value::from("pay/kept"), &Value::from(store.context().name())));
    idem_at(url, &[&["stats"], scan].concat()).ends(0).says("pay\n    1 completed");
    idem_at(url, &[&["watch", "--times", "1"], scan].concat()).ends(0).says("0 running");
    idem_at(url, &[&["forget", "--prefix", "pay/ke", "--dry-run"], scan].concat()).ends(0).says("pay/kept");
    idem_at(url, &["conformance", "store"]).ends(2).complains("add --yes");
    let some = ["conformance", "store", "--yes", "--json", "--case", "first_reservation", "--case", "resolve_fences"];
    let verdicts = idem_at(url, &some).ends(0).lines();
    assert!(verdicts.len() == 2 && verdicts.iter().all(|it| it["passed"] == true), "{verdicts:?}");
}

/// Returns the doctor's finding for a check: the level, and the whole finding.
fn found(run: &Run, check: &str) -> (String, Value) {
    let all = run.lines();
    let finding = all.iter().find(|it| it["check"] == check).unwrap_or_else(|| panic!("no `{check}` in {all:#?}"));
    let level = finding["level"].as_str().unwrap().to_owned();
    let document = include_str!("../../../docs/cli.md");
    for finding in &all {
        let check = finding["check"].as_str().unwrap();
        assert!(document.contains(&format!("`{check}`")), "docs/cli.md does not name the check `{check}`");
    }
    if level != "ok" {
        assert!(!finding["consequence"].as_str().unwrap().is_empty(), "{finding}");
        assert!(!finding["remedy"].as_str().unwrap().is_empty(), "{finding}");
    }
    (level, finding.clone())
}

#[track_caller]
fn finds(run: &Run, check: &str, level: &str, text: &str) {
    let (is, finding) = found(run, check);
    assert_eq!(is, level, "{finding}");
    assert!(finding["found"].as_str().unwrap().contains(text), "no `{text}` in {finding}");
}

#[tokio::test]
async fn all_commands_work_on_a_sqlite_file() {
    let records = Records::new().await;
    settles(&records.url(), &records.store).await;
    let doctor = records.idem(&["doctor", "--json"]).ends(0);
    for check in ["journal mode", "integrity", "permissions", "probe"] {
        finds(&doctor, check, "ok", "");
    }
    let told = records.idem(&["doctor"]).ends(0);
    told.says("ok       journal mode: wal\n").says("sqlite: checks: 6, errors: 0, warnings: ");
    let probes: i64 = idem_tests::sqlite::raw(&records.folder.file())
        .query_row("SELECT count(*) FROM idem_records WHERE key LIKE '1/idem-doctor/%'", [], |row| row.get(0))
        .unwrap();
    assert_eq!(probes, 0, "the doctor leaves nothing behind");
    records
        .idem(&["conformance", "store", "--case", "no_such", "--yes"])
        .ends(2)
        .complains("there is no clause `no_such`");
}

#[tokio::test]
async fn all_commands_work_on_a_nats_server() {
    let server = NatsServer::start();
    let url = format!("{}/orders", server.url());
    idem_at(&url, &["show", "pay/42"]).ends(3).complains("there is no bucket `orders`");
    idem_at(&url, &["schema", "diff"]).ends(4);
    finds(&idem_at(&url, &["doctor", "--json"]).ends(1), "stream", "error", "there is no stream `KV_orders`");
    for _ in 0..2 {
        idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    }
    idem_at(&url, &["schema", "diff"]).ends(0);
    let store = NatsStore::options().bucket("orders").connect(&server.url()).await.unwrap();
    settles(&url, &store).await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    for check in ["version", "max_payload", "stream", "protection", "room", "probe"] {
        finds(&doctor, check, "ok", "");
    }
    finds(&doctor, "replicas", "warning", "1");
    finds(&doctor, "sync_interval", "unknown", "");
    // A stream of another program, whose settings are worse.
    let raw = async_nats::connect(server.url()).await.unwrap();
    let settings = r#"{"name":"KV_worse","subjects":["$KV.worse.>"],"max_msgs_per_subject":1,"allow_msg_ttl":true,
        "discard":"new","max_bytes":1000,"allow_rollup_hdrs":true,"retention":"limits","storage":"file"}"#;
    raw.request("$JS.API.STREAM.CREATE.KV_worse", settings.into()).await.unwrap();
    nats::put(&server.url(), "$KV.worse.x", &[0; 900]).await;
    let worse = idem_at(&format!("{}/worse", server.url()), &["doctor", "--json"]).ends(1);
    finds(&worse, "protection", "warning", "deny_delete");
    finds(&worse, "room", "warning", "max_bytes");
    finds(&worse, "stream", "ok", "");
    let settings = settings.replace("worse", "bad").replace("\"max_bytes\":1000", "\"max_age\":3600000000000");
    raw.request("$JS.API.STREAM.CREATE.KV_bad", settings.into()).await.unwrap();
    let bad = format!("{}/bad", server.url());
    finds(&idem_at(&bad, &["doctor", "--json"]).ends(1), "stream", "error", "max_age");
    idem_at(&bad, &["schema", "diff"]).ends(1).says("max_age");
    idem_at(&bad, &["schema", "migrate", "--yes"]).ends(1).complains("max_age");
}

#[tokio::test]
async fn all_commands_work_on_a_redis_server() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let url = server.url();
    let store = RedisStore::connect(&url).await.unwrap();
    settles(&url, &store).await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    for check in ["version", "eviction", "memory", "permissions", "probe"] {
        finds(&doctor, check, "ok", "");
    }
    finds(&doctor, "persistence", "ok", "each second");
    finds(&doctor, "replication", "warning", "no replica");
    // A value that is not a record is shown as damaged and can be forgotten. A value of another Redis type was written
    // by another program, and is left unchanged.
    let mut raw = raw(&url).await;
    let _: () = redis::cmd("SET").arg("idem:1/pay/odd").arg("not a record").query_async(&mut raw).await.unwrap();
    idem_at(&url, &["show", "pay/odd"]).ends(0).says("damaged: the value is not a record");
    let seen = revision(&url, "pay/odd");
    idem_at(&url, &["forget", "pay/odd", "--seen", &seen, "--yes"]).ends(0).says("which was damaged");
    idem_at(&url, &["show", "pay/odd"]).ends(4);
    let _: () = redis::cmd("RPUSH").arg("idem:1/pay/odd").arg("x").query_async(&mut raw).await.unwrap();
    idem_at(&url, &["show", "pay/odd"]).ends(1).complains("another type of Redis").complains("`TYPE`");
    // The key is accepted in the server's form. In another namespace, the key has no record.
    idem_at(&url, &["show", "idem:1/pay/kept"]).ends(0).says("completed");
    idem_at(&url, &["show", "pay/kept", "--namespace", "shop:"]).ends(4);
}

/// The test's server also speaks TLS, with a certificate that is not trusted by default.
#[test]
fn commands_reach_redis_by_tls_if_its_certificate_is_trusted() {
    let certificate = Certificate::new();
    let port = idem_tests::server::free_port();
    let tls =
        ["--tls-port", &port.to_string(), "--tls-cert-file", &certificate.file(), "--tls-key-file", &certificate.key()];
    let rest = ["--tls-auth-clients", "no", "--requirepass", "secret"];
    let server = RedisServer::start_with(Kind::Redis, &[&tls[..], &rest].concat());
    let with = |url: &str, trusted: bool, arguments: &[&str]| {
        let mut idem = command(arguments);
        if trusted {
            idem.env("SSL_CERT_FILE", certificate.file());
        }
        let run = run(idem.env("IDEM_STORE", url));
        assert!(!run.err.contains("secret") && !run.out.contains("secret"), "{run:?}");
        run
    };
    let url = format!("rediss://:secret@localhost:{port}");
    with(&url, true, &["show", "pay/42"]).ends(4).complains("there is no record");
    finds(&with(&url, true, &["doctor", "--json"]), "probe", "ok", "");
    let verdicts =
        with(&url, true, &["conformance", "store", "--yes", "--json", "--case", "first_reservation"]).ends(0);
    assert_eq!(verdicts.json()["passed"], true);
    // The cases are an untrusted certificate, the certificate of another host, a port without TLS, and a wrong
    // password.
    for (url, trusted, text) in [
        (url.clone(), false, "certificate: "),
        (format!("rediss://:secret@127.0.0.1:{port}"), true, "not valid for name"),
        (format!("rediss://:secret@localhost:{}", server.port()), true, ""),
        (format!("rediss://:wrong-secret@localhost:{port}"), true, ""),
    ] {
        for verb in [&["show", "pay/42", "--timeout", "5"][..], &["doctor", "--timeout", "5"]] {
            let refused = with(&url, trusted, verb).ends(3);
            assert!(refused.err.contains(text) && refused.err.starts_with("idem: "), "no `{text}` in {refused:?}");
            assert_eq!(refused.err.contains("SSL_CERT_FILE"), !text.is_empty(), "{refused:?}");
        }
    }
}

#[tokio::test]
async fn commands_work_on_a_redis_cluster() {
    let cluster = Cluster::start(5000);
    let url = cluster.url();
    settles(&url, &RedisStore::connect(&url).await.unwrap()).await;
    let doctor = idem_at(&url, &["doctor", "--json"]);
    finds(&doctor, "cluster", "ok", "cluster_state ok");
    finds(&doctor, "probe", "ok", "");
    // The URL of a single server is refused if the server is a node of a cluster.
    let node = format!("redis://127.0.0.1:{}", cluster.ports()[0]);
    idem_at(&node, &["show", "pay/42"]).ends(3).complains("redis-cluster://");
}

#[tokio::test]
async fn commands_work_on_redis_with_sentinels() {
    let watched = Watched::start(30_000);
    let url = watched.url();
    settles(&url, &RedisStore::connect(&url).await.unwrap()).await;
    finds(&idem_at(&url, &["doctor", "--json"]), "probe", "ok", "");
    let (sentinels, _) = url.rsplit_once('/').unwrap();
    idem_at(&format!("{sentinels}/other"), &["doctor"]).ends(3).complains("no sentinel knows `other`");
}

#[tokio::test]
async fn the_doctor_of_redis_finds_settings_that_lose_records() {
    let server = RedisServer::start_with(
        Kind::Redis,
        &["--appendonly", "no", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"],
    );
    let url = server.url();
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(1);
    finds(&doctor, "persistence", "error", "nothing is written to disk");
    finds(&doctor, "eviction", "error", "allkeys-lru");
    finds(&doctor, "probe", "ok", "");
    let mut raw = server.raw().await;
    for setting in [["save", "3600 1"], ["appendonly", "no"], ["maxmemory", "0"]] {
        let _: () = redis::cmd("CONFIG").arg("SET").arg(&setting).query_async(&mut raw).await.unwrap();
    }
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    finds(&doctor, "persistence", "warning", "snapshots only");
    finds(&doctor, "eviction", "warning", "without a limit");
    // The login `bob` may not publish, and so can't wake waiting duplicates.
    let acl = ["SETUSER", "bob", "on", ">secret", "~idem:*", "&idem:*", "+@all", "-publish"];
    let _: () = redis::cmd("ACL").arg(&acl).query_async(&mut raw).await.unwrap();
    let login = url.replace("redis://", "redis://bob:secret@");
    let doctor = idem_at(&login, &["doctor", "--json"]).ends(1);
    finds(&doctor, "permissions", "error", "`bob` may not send PUBLISH");
    assert!(!doctor.out.contains("secret"));
    let _: () = redis::cmd("ACL").arg(&["SETUSER", "bob", "-acl"]).query_async(&mut raw).await.unwrap();
    finds(&idem_at(&login, &["doctor", "--json"]).ends(0), "permissions", "unknown", "may not ask");
    // The login `carol` has exactly the rights that the guide lists for calls, in its own namespace.
    let rights = "+info +script|load +eval +evalsha +set +get +mget +pttl +pexpire +pexpiretime +getrange +setrange +publish +subscribe +ping";
    let acl = ["SETUSER", "carol", "on", ">secret", "~shop:*", "&shop:*", "+acl|whoami", "+acl|dryrun"];
    let _: () =
        redis::cmd("ACL").arg(&acl).arg(rights.split(' ').collect::<Vec<_>>()).query_async(&mut raw).await.unwrap();
    let login = url.replace("redis://", "redis://carol:secret@");
    let doctor = idem_at(&login, &["doctor", "--json", "--namespace", "shop:"]).ends(0);
    finds(&doctor, "permissions", "ok", "`carol` may send each command that calls need");
    finds(&doctor, "permissions for replicas", "warning", "`carol` may not send WAIT, PEXPIREAT, PERSIST, DEL");
    finds(&doctor, "permissions for lists", "warning", "`carol` may not send SCAN, STRLEN");
    finds(&idem_at(&login, &["doctor", "--json"]).ends(1), "permissions", "error", "`carol` may not send SET");
    let wrong = url.replace("redis://", "redis://bob:wrong-secret@");
    let refused = idem_at(&wrong, &["show", "pay/42"]).ends(3);
    assert!(!refused.err.contains("wrong-secret"), "{refused:?}");
}

/// Asserts that the commands miss the table of a new server, and create it.
fn creates_the_table(url: &str) {
    idem_at(url, &["show", "pay/42"]).ends(3).complains("there is no table");
    finds(&idem_at(url, &["doctor", "--json"]).ends(1), "schema", "error", "there is no table");
    idem_at(url, &["schema", "diff"]).ends(4);
    idem_at(url, &["schema", "migrate", "--yes"]).ends(0);
    idem_at(url, &["schema", "diff"]).ends(0);
}

#[tokio::test]
async fn all_commands_work_on_a_postgresql_server() {
    let server = PostgresServer::start();
    let url = server.url();
    creates_the_table(&url);
    let store = PostgresStore::connect(&url).await.unwrap();
    settles(&url, &store).await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    for check in [
        "version",
        "fsync",
        "synchronous_commit",
        "schema",
        "dead rows",
        "autovacuum",
        "open transactions",
        "purge",
        "pooler",
        "probe",
    ] {
        finds(&doctor, check, "ok", "");
    }
    // The printed command shows the record.
    let printed = idem_at(&url, &["key", "pay/kept"]).ends(0).out;
    let psql = printed.lines().find_map(|line| line.strip_prefix("postgres ")).unwrap_or_else(|| panic!("{printed}"));
    let clients = std::env::var("IDEM_TEST_POSTGRES").unwrap_or_else(|_| "/usr/lib/postgresql/15/bin".to_owned());
    let path = format!("{clients}:{}", std::env::var("PATH").unwrap());
    let shown = run(std::process::Command::new("sh").args(["-c", psql]).env("PATH", path)).ends(0);
    assert!(shown.out.contains("1/pay/kept") && shown.out.contains("completed"), "{shown:?}");
    // Records of PostgreSQL have no namespace, so another namespace would show the same records.
    idem_at(&url, &["show", "pay/kept", "--namespace", "shop:"]).ends(2).complains("`?schema=NAME`");
    // A URL with another schema names another store, which has no table yet.
    let other = format!("{url}?schema=shop");
    idem_at(&other, &["show", "pay/42"]).ends(3);
    idem_at(&other, &["schema", "migrate", "--yes"]).ends(0);
    idem_at(&other, &["show", "pay/42"]).ends(4);
    // The printed grants are sufficient for a login.
    let raw = postgres::raw(&url).await;
    let print = ["schema", "print", "postgres", "--schema", "shop", "--login", "handlers"];
    raw.batch_execute(&format!("CREATE ROLE handlers LOGIN; {}", idem_at(&url, &print).ends(0).out)).await.unwrap();
    let login = other.replace("postgres@", "handlers@");
    finds(&idem_at(&login, &["doctor", "--json"]).ends(0), "probe", "ok", "");
    raw.batch_execute("REVOKE UPDATE ON shop.records FROM handlers").await.unwrap();
    finds(&idem_at(&login, &["doctor", "--json"]).ends(1), "open", "error", "lacks UPDATE on the table");
    // The doctor finds a pooler, unless the URL names it.
    let pooler = PgBouncer::start(server.port());
    let doctor = idem_at(&pooler.url(), &["doctor", "--json"]).ends(1);
    finds(&doctor, "pooler", "error", "each transaction");
    let doctor = idem_at(&format!("{}?pgbouncer=true", pooler.url()), &["doctor", "--json"]).ends(0);
    finds(&doctor, "pooler", "ok", "share sessions");
    finds(&idem_at(&format!("{url}?pgbouncer=true"), &["doctor", "--json"]).ends(0), "pooler", "warning", "");
    // The doctor finds settings that lose records in a crash, and `schema diff` finds a table of a later release.
    raw.batch_execute("ALTER ROLE postgres SET synchronous_commit = off").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(1), "synchronous_commit", "error", "off");
    raw.batch_execute("ALTER ROLE postgres RESET synchronous_commit").await.unwrap();
    raw.batch_execute("ALTER TABLE idem.records SET (autovacuum_enabled = off)").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "autovacuum", "warning", "for this table");
    raw.batch_execute("DROP INDEX idem.records_listed_at").await.unwrap();
    idem_at(&url, &["schema", "diff"]).ends(1).says("no index on `listed_at`");
    raw.batch_execute("COMMENT ON TABLE idem.records IS 'idem 99'").await.unwrap();
    idem_at(&url, &["schema", "diff"]).ends(1).says("its comment names the version `idem 99`");
    idem_at(&url, &["show", "pay/42"]).ends(3).complains("of another version");
    let wrong = url.replace("postgres@", "nobody:secret@");
    let refused = idem_at(&wrong, &["show", "pay/42"]).ends(3);
    assert!(!refused.err.contains("secret"), "{refused:?}");
}

#[tokio::test]
async fn the_doctor_of_postgresql_warns_that_a_failover_would_lose_records() {
    let primary = PostgresServer::start();
    idem_at(&primary.url(), &["schema", "migrate", "--yes"]).ends(0);
    finds(&idem_at(&primary.url(), &["doctor", "--json"]).ends(0), "replication", "ok", "no standby");
    let standby = PostgresServer::standby_of(&primary, primary.port());
    let raw = primary.raw().await;
    until("the standby follows", async || {
        raw.query_one("SELECT count(*) FROM pg_stat_replication", &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    finds(&idem_at(&primary.url(), &["doctor", "--json"]).ends(0), "replication", "warning", "no commit waits");
    finds(&idem_at(&standby.url(), &["doctor", "--json"]).ends(1), "role", "error", "a standby");
    raw.batch_execute("ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'").await.unwrap();
    raw.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until("commits wait", async || {
        let names = raw.query_one("SELECT current_setting('synchronous_standby_names')", &[]).await.unwrap();
        names.get::<_, &str>(0) == "ANY 1 (*)"
    })
    .await;
    finds(&idem_at(&primary.url(), &["doctor", "--json"]).ends(0), "replication", "ok", "commits wait");
}

#[tokio::test]
async fn a_standby_of_postgresql_can_be_read() {
    let primary = PostgresServer::start();
    idem_at(&primary.url(), &["schema", "migrate", "--yes"]).ends(0);
    let store = PostgresStore::connect(&primary.url()).await.unwrap();
    completed(&store, "done", b"\"receipt\"").await;
    interrupted(&store, "42").await;
    let standby = PostgresServer::standby_of(&primary, primary.port());
    let url = standby.url();
    let raw = standby.raw().await;
    until("the standby has the records", async || {
        let rows = "SELECT count(*) FROM idem.records WHERE state IN ('completed', 'interrupted')";
        raw.query_one(rows, &[]).await.is_ok_and(|row| row.get::<_, i64>(0) == 2)
    })
    .await;
    idem_at(&url, &["show", "pay/done", "--result"]).ends(0).says("\n\"receipt\"\n");
    idem_at(&url, &["show", "pay/none"]).ends(4);
    idem_at(&url, &["list", "--uncertain"]).ends(0).says("interrupted").says("pay/42");
    idem_at(&url, &["stats"]).ends(0).says("pay\n    1 interrupted, 1 completed");
    idem_at(&url, &["watch", "--times", "1"]).ends(0).says("1 interrupted");
    idem_at(&url, &["resolve", "pay/42", "--shape"]).ends(0).says("text, as in `pay/done`");
    idem_at(&url, &["forget", "--prefix", "pay/", "--dry-run"]).ends(0).says("pay/42");
    // Decisions are refused, with the advice to connect to the primary.
    let seen = revision(&url, "pay/42");
    assert_eq!(seen, revision(&primary.url(), "pay/42"));
    for verb in [&["reopen", "pay/42", "--seen", &seen, "--yes"][..], &["purge"], &["schema", "migrate", "--yes"]] {
        idem_at(&url, verb).ends(3).complains("connect to the primary");
    }
    finds(&idem_at(&url, &["doctor", "--json"]).ends(1), "role", "error", "a standby");
    // A login that may only read suffices, also in a session that allows only reading.
    let owner = primary.raw().await;
    let role =
        "CREATE ROLE support LOGIN; GRANT USAGE ON SCHEMA idem TO support; GRANT SELECT ON idem.records TO support;
                ALTER ROLE support SET default_transaction_read_only = on";
    owner.batch_execute(role).await.unwrap();
    let login = primary.url().replace("postgres@", "support@");
    idem_at(&login, &["show", "pay/42"]).ends(0).says("interrupted");
    idem_at(&login, &["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(3).complains("allows reading only");
    owner.batch_execute("REVOKE SELECT ON idem.records FROM support").await.unwrap();
    idem_at(&login, &["show", "pay/42"]).ends(3).complains("lacks SELECT on the table");
    // With both hosts in one URL, a command that only reads accepts either host.
    let both = format!("postgres://postgres@127.0.0.1:{},127.0.0.1:{}/postgres", standby.port(), primary.port());
    idem_at(&both, &["show", "pay/42"]).ends(0);
    idem_at(&both, &["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(0);
}

#[tokio::test]
async fn migrate_fails_on_postgresql_if_a_column_an_index_or_a_right_is_missing_afterwards() {
    let server = PostgresServer::start();
    let url = server.url();
    let migrate = ["schema", "migrate", "--yes"];
    idem_at(&url, &migrate).ends(0).says("postgres has what this release needs");
    let raw = postgres::raw(&url).await;
    raw.batch_execute("DROP INDEX idem.records_listed_at").await.unwrap();
    let refused = idem_at(&url, &migrate).ends(1);
    refused.complains("there is no index on `listed_at`").complains("`idem schema print postgres`");
    raw.batch_execute("DROP INDEX idem.records_undecided").await.unwrap();
    idem_at(&url, &["doctor"]).says("there is no index on `key` where `on_crash_fail`");
    raw.batch_execute("CREATE INDEX records_undecided ON idem.records (key) WHERE on_crash_fail").await.unwrap();
    raw.batch_execute("CREATE INDEX records_listed_at ON idem.records (listed_at)").await.unwrap();
    raw.batch_execute("ALTER TABLE idem.records DROP COLUMN begun").await.unwrap();
    let refused = idem_at(&url, &migrate);
    assert!([1, 3].contains(&refused.status) && refused.err.contains("begun"), "{refused:?}");
    raw.batch_execute("ALTER TABLE idem.records ADD COLUMN begun boolean NOT NULL DEFAULT false").await.unwrap();
    idem_at(&url, &migrate).ends(0);
    let role = "CREATE ROLE handlers LOGIN; GRANT USAGE ON SCHEMA idem TO handlers;
                GRANT SELECT, INSERT ON idem.records TO handlers";
    raw.batch_execute(role).await.unwrap();
    let login = url.replace("postgres@", "handlers@");
    idem_at(&login, &migrate).ends(3).complains("lacks UPDATE on the table");
    raw.batch_execute("GRANT UPDATE ON idem.records TO handlers").await.unwrap();
    idem_at(&login, &migrate).ends(0);
}

#[tokio::test]
async fn all_commands_work_on_a_mysql_server() {
    let server = MySqlServer::start();
    let url = server.url();
    creates_the_table(&url);
    let store = MySqlStore::connect(&url).await.unwrap();
    settles(&url, &store).await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    for check in [
        "version",
        "innodb_flush_log_at_trx_commit",
        "innodb_doublewrite",
        "role",
        "max_allowed_packet",
        "replication",
        "clock",
        "schema",
        "permissions",
        "purge",
        "probe",
    ] {
        finds(&doctor, check, "ok", "");
    }
    // The printed command shows the record. This login has no password, for which the command would ask.
    let printed = idem_at(&url, &["key", "pay/kept"]).ends(0).out;
    let client = printed.lines().find_map(|line| line.strip_prefix("mysql ")).unwrap_or_else(|| panic!("{printed}"));
    let shown = std::process::Command::new("sh").args(["-c", &client.replace(" -p ", " ")]).output().unwrap();
    // The owner token is no text.
    let text = String::from_utf8_lossy(&shown.stdout);
    assert!(text.contains("1/pay/kept") && text.contains("completed"), "{shown:?}");
    // Records of MySQL have no namespace, so another namespace would show the same records.
    idem_at(&url, &["show", "pay/kept", "--namespace", "shop:"]).ends(2).complains("`?table=NAME`");
    // A URL with another table names another store, which has no table yet.
    let other = format!("{url}?table=shop");
    idem_at(&other, &["show", "pay/42"]).ends(3);
    idem_at(&other, &["schema", "migrate", "--yes"]).ends(0);
    idem_at(&other, &["show", "pay/42"]).ends(4);
    // The printed grants are sufficient for a login, and the doctor names a right that is missing.
    let mut raw = mysql::raw(&url).await;
    raw.query_drop("CREATE USER handlers@'%'").await.unwrap();
    let print = ["schema", "print", "mysql", "--table", "shop", "--login", "handlers"];
    for statement in idem_at(&url, &print).ends(0).out.split_inclusive(';').filter(|it| it.contains("GRANT")) {
        raw.query_drop(statement).await.unwrap();
    }
    let login = other.replace("root@", "handlers@");
    let doctor = idem_at(&login, &["doctor", "--json"]).ends(0);
    finds(&doctor, "permissions", "ok", "");
    finds(&doctor, "probe", "ok", "");
    raw.query_drop("REVOKE DELETE ON shop FROM handlers@'%'").await.unwrap();
    finds(&idem_at(&login, &["doctor", "--json"]).ends(1), "permissions", "warning", "lacks DELETE on the table");
    for right in ["UPDATE", "INSERT"] {
        raw.query_drop(format!("REVOKE {right} ON shop FROM handlers@'%'")).await.unwrap();
        let doctor = idem_at(&login, &["doctor", "--json"]).ends(1);
        finds(&doctor, "permissions", "error", right);
        finds(&doctor, "open", "error", &format!("lacks {right} on the table"));
    }
    // The doctor finds settings that lose records in a crash, and `schema diff` finds a table of a later release.
    raw.query_drop("SET GLOBAL innodb_flush_log_at_trx_commit = 2").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(1), "innodb_flush_log_at_trx_commit", "error", "2");
    raw.query_drop("SET GLOBAL innodb_flush_log_at_trx_commit = 1").await.unwrap();
    raw.query_drop("ALTER TABLE idem_records DROP INDEX listed_at").await.unwrap();
    idem_at(&url, &["schema", "diff"]).ends(1).says("no index on `listed_at`");
    finds(&idem_at(&url, &["doctor", "--json"]), "schema", "error", "no index on `listed_at`");
    raw.query_drop("ALTER TABLE idem_records COMMENT = 'idem 99'").await.unwrap();
    idem_at(&url, &["schema", "diff"]).ends(1).says("its comment names the version `idem 99`");
    idem_at(&url, &["show", "pay/42"]).ends(3).complains("of another version");
    let wrong = url.replace("root@", "nobody:secret@");
    let refused = idem_at(&wrong, &["show", "pay/42"]).ends(3);
    assert!(!refused.err.contains("secret"), "{refused:?}");
}

#[tokio::test]
async fn the_doctor_of_mysql_finds_expired_records_and_a_clock_that_differs() {
    let server = MySqlServer::start();
    let url = server.url();
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    let store = MySqlStore::connect(&url).await.unwrap();
    for at in 0..3 {
        expired(&store, &at.to_string()).await;
    }
    let mut raw = mysql::raw(&url).await;
    let days = 3 * 86_400_000_000_u64;
    raw.query_drop(format!("UPDATE idem_records SET listed_at = listed_at - {days}")).await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "purge", "ok", "3 records were due a day ago; the oldest 3 d");
    let rows = format!(
        "INSERT INTO idem_records (`key`, owner, format, state, attempt, attempts_used, on_crash_fail, lapses_at, expires_at, \
         listed_at, first_seen_at, began_at) WITH RECURSIVE numbers AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM numbers \
         WHERE n < 10000) SELECT concat('1/pay/many', n), '0123456789abcdef', 1, 'released', 1, 1, 0, 0, 0, {days}, 0, 0 \
         FROM numbers"
    );
    let limit = if mysql::is_mariadb() { "max_recursive_iterations" } else { "cte_max_recursion_depth" };
    raw.query_drop(format!("SET SESSION {limit} = 20000")).await.unwrap();
    raw.query_drop(rows).await.unwrap();
    finds(
        &idem_at(&url, &["doctor", "--json"]).ends(0),
        "purge",
        "warning",
        "10000 records or more were due a day ago",
    );
    idem_at(&url, &["purge"]).ends(0).says("10003");
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "purge", "ok", "no record was due");
    // The time of every session, as of a server whose clock stands.
    raw.query_drop("SET GLOBAL init_connect = 'SET timestamp = 1'").await.unwrap();
    raw.query_drop("CREATE USER worker@'%'").await.unwrap();
    raw.query_drop("GRANT ALL ON idem.idem_records TO worker@'%'").await.unwrap();
    let doctor = idem_at(&url.replace("root@", "worker@"), &["doctor", "--json"]);
    finds(&doctor, "clock", "warning", "behind this machine's");
}

#[tokio::test]
async fn the_doctor_of_mysql_warns_that_a_failover_would_lose_records() {
    let primary = MySqlServer::primary();
    let url = primary.url();
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "replication", "ok", "no replica");
    let replica = MySqlServer::replica_of(&primary).await;
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "replication", "ok", "wait for a replica, for 600000 ms");
    finds(&idem_at(&replica.url(), &["doctor", "--json"]).ends(1), "role", "error", "a replica");
    primary.stop_waiting().await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    finds(&doctor, "replication", "warning", "no commit waits for a replica, and 1 follow");
    for check in ["binlog_format", "sync_binlog"] {
        finds(&doctor, check, "ok", "");
    }
}

#[tokio::test]
async fn a_replica_of_mysql_can_be_read() {
    let primary = MySqlServer::primary();
    idem_at(&primary.url(), &["schema", "migrate", "--yes"]).ends(0);
    let store = MySqlStore::connect(&primary.url()).await.unwrap();
    completed(&store, "done", b"\"receipt\"").await;
    interrupted(&store, "42").await;
    let replica = MySqlServer::replica_of(&primary).await;
    let url = replica.url();
    let mut raw = replica.raw().await;
    until("the replica has the records", async || {
        let rows = "SELECT count(*) FROM idem_records WHERE state IN ('completed', 'interrupted')";
        matches!(raw.query_first::<u64, _>(rows).await, Ok(Some(2)))
    })
    .await;
    idem_at(&url, &["show", "pay/done", "--result"]).ends(0).says("\n\"receipt\"\n");
    idem_at(&url, &["show", "pay/none"]).ends(4);
    idem_at(&url, &["list", "--uncertain"]).ends(0).says("interrupted").says("pay/42");
    idem_at(&url, &["stats"]).ends(0).says("pay\n    1 interrupted, 1 completed");
    idem_at(&url, &["watch", "--times", "1"]).ends(0).says("1 interrupted");
    idem_at(&url, &["resolve", "pay/42", "--shape"]).ends(0).says("text, as in `pay/done`");
    idem_at(&url, &["forget", "--prefix", "pay/", "--dry-run"]).ends(0).says("pay/42");
    // Decisions are refused, with the advice to connect to the primary.
    let seen = revision(&url, "pay/42");
    assert_eq!(seen, revision(&primary.url(), "pay/42"));
    for verb in [&["reopen", "pay/42", "--seen", &seen, "--yes"][..], &["purge"], &["schema", "migrate", "--yes"]] {
        idem_at(&url, verb).ends(3).complains("connect to the primary");
    }
    // A login that may only read suffices.
    let mut owner = primary.raw().await;
    owner.query_drop("CREATE USER support@'%'").await.unwrap();
    owner.query_drop("GRANT SELECT ON idem_records TO support@'%'").await.unwrap();
    let login = primary.url().replace("root@", "support@");
    idem_at(&login, &["show", "pay/42"]).ends(0).says("interrupted");
    idem_at(&login, &["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(3).complains("lacks INSERT on the table");
    owner.query_drop("REVOKE SELECT ON idem_records FROM support@'%'").await.unwrap();
    idem_at(&login, &["show", "pay/42"]).ends(3);
    idem_at(&primary.url(), &["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(0);
}

#[tokio::test]
async fn migrate_fails_on_mysql_if_a_column_an_index_or_a_right_is_missing_afterwards() {
    let server = MySqlServer::start();
    let url = server.url();
    let migrate = ["schema", "migrate", "--yes"];
    idem_at(&url, &migrate).ends(0).says("mysql has what this release needs");
    let mut raw = mysql::raw(&url).await;
    raw.query_drop("ALTER TABLE idem_records DROP INDEX listed_at").await.unwrap();
    let refused = idem_at(&url, &migrate).ends(1);
    refused.complains("there is no index on `listed_at`").complains("`idem schema print mysql`");
    raw.query_drop("ALTER TABLE idem_records DROP INDEX undecided").await.unwrap();
    idem_at(&url, &["doctor"]).says("there is no index on `key` where `on_crash_fail`");
    let indexes = "ADD INDEX undecided (on_crash_fail, `key`), ADD INDEX listed_at (listed_at)";
    raw.query_drop(format!("ALTER TABLE idem_records {indexes}")).await.unwrap();
    raw.query_drop("ALTER TABLE idem_records DROP COLUMN begun").await.unwrap();
    let refused = idem_at(&url, &migrate);
    assert!([1, 3].contains(&refused.status) && refused.err.contains("begun"), "{refused:?}");
    raw.query_drop("ALTER TABLE idem_records ADD COLUMN begun tinyint NOT NULL DEFAULT 0").await.unwrap();
    idem_at(&url, &migrate).ends(0);
    raw.query_drop("CREATE USER handlers@'%'").await.unwrap();
    raw.query_drop("GRANT SELECT, INSERT ON idem_records TO handlers@'%'").await.unwrap();
    let login = url.replace("root@", "handlers@");
    idem_at(&login, &migrate).ends(3).complains("lacks UPDATE on the table");
    raw.query_drop("GRANT UPDATE ON idem_records TO handlers@'%'").await.unwrap();
    idem_at(&login, &migrate).ends(0);
}

/// The server takes only encrypted connections, with a certificate that is not trusted by default.
#[tokio::test]
async fn commands_reach_mysql_by_tls_if_its_certificate_is_trusted() {
    let certificate = Certificate::new();
    let files = [("cert", certificate.file()), ("key", certificate.key())];
    let args = files.map(|(name, file)| format!("--ssl-{name}={file}"));
    let server = MySqlServer::start_with(&args.each_ref().map(|arg| &**arg));
    idem_at(&server.url(), &["schema", "migrate", "--yes"]).ends(0);
    server.raw().await.query_drop("SET GLOBAL require_secure_transport = 1").await.unwrap();
    let with = |url: &str, trusted: bool, arguments: &[&str]| {
        let mut idem = command(arguments);
        if trusted {
            idem.env("SSL_CERT_FILE", certificate.file());
        }
        run(idem.env("IDEM_STORE", url))
    };
    let plain = server.url().replace("127.0.0.1", "localhost");
    let url = format!("{plain}?require_ssl=true");
    with(&url, true, &["show", "pay/42"]).ends(4).complains("there is no record");
    finds(&with(&url, true, &["doctor", "--json"]).ends(0), "probe", "ok", "");
    for (url, trusted, text) in [
        (&url, false, "certificate: "),
        (&format!("{}?require_ssl=true", server.url()), true, "not valid for name"),
        (&plain, true, "require_ssl=true"),
    ] {
        for verb in [&["show", "pay/42", "--timeout", "5"][..], &["doctor", "--timeout", "5"]] {
            let refused = with(url, trusted, verb).ends(3);
            assert!(refused.err.contains(text) && refused.err.starts_with("idem: "), "no `{text}` in {refused:?}");
        }
    }
}

#[tokio::test]
async fn the_doctor_of_a_full_redis_server_advises_to_make_room() {
    let server = RedisServer::start_with(Kind::Redis, &["--appendonly", "yes"]);
    let mut raw = server.raw().await;
    for setting in [["maxmemory-policy", "noeviction"], ["maxmemory", "1"]] {
        let _: () = redis::cmd("CONFIG").arg("SET").arg(&setting).query_async(&mut raw).await.unwrap();
    }
    let doctor = idem_at(&server.url(), &["doctor", "--json"]).ends(1);
    finds(&doctor, "memory", "error", "of maxmemory");
    finds(&doctor, "probe", "error", "`reserve` failed");
    let (_, finding) = found(&doctor, "probe");
    let remedy = finding["remedy"].as_str().unwrap();
    assert!(remedy.contains("make room") && !remedy.contains("right"), "{finding}");
}

/// Starts a purge of one record at a time.
fn purges(url: &str) -> Child {
    let mut purge = command(["purge", "--batch", "1", "--timeout", "600"]);
    purge.env("IDEM_STORE", url).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Asserts that the server has ended after three removals of `purge`.
fn was_interrupted(purge: Child) {
    let output = purge.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(3), 0), "{said}");
    assert!(said.contains("3 expired records were removed before that: repeat it"), "{said}");
}

#[tokio::test]
async fn an_interrupted_purge_is_an_error_and_a_second_purge_finishes() {
    let mut server = PostgresServer::start();
    let url = server.url();
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    let store = PostgresStore::connect(&url).await.unwrap();
    interrupted(&store, "kept").await;
    for at in 0..6 {
        expired(&store, &at.to_string()).await;
    }
    let raw = server.raw().await;
    let hangs = "CREATE FUNCTION idem.hangs() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                     IF (SELECT count(*) FROM idem.records) = 4 THEN PERFORM pg_sleep(600); END IF;
                     RETURN OLD;
                 END $$;
                 CREATE TRIGGER hangs BEFORE DELETE ON idem.records FOR EACH ROW EXECUTE FUNCTION idem.hangs()";
    raw.batch_execute(hangs).await.unwrap();
    let purge = purges(&url);
    until("it is in the middle", async || {
        let asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'";
        raw.query_one(asleep, &[]).await.unwrap().get::<_, i64>(0) == 1
    })
    .await;
    server.kill();
    was_interrupted(purge);
    server.run();
    server.raw().await.batch_execute("DROP TRIGGER hangs ON idem.records").await.unwrap();
    idem_at(&url, &["purge", "--batch", "1"]).ends(0).says("3 expired records removed from postgres");
    let rest = idem_at(&url, &["list", "--json"]).ends(0).json();
    assert_eq!(rest["key"], "pay/kept");
}

#[tokio::test]
async fn an_interrupted_purge_of_mysql_is_an_error_and_a_second_purge_finishes() {
    let mut server = MySqlServer::start();
    let url = server.url();
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    let store = MySqlStore::connect(&url).await.unwrap();
    interrupted(&store, "kept").await;
    for at in 0..6 {
        expired(&store, &at.to_string()).await;
    }
    let mut raw = server.raw().await;
    let hangs = "CREATE TRIGGER hangs BEFORE DELETE ON idem_records FOR EACH ROW \
                 IF (SELECT count(*) FROM idem_records) = 4 THEN DO sleep(600); END IF";
    raw.query_drop(hangs).await.unwrap();
    let purge = purges(&url);
    until("it is in the middle", async || {
        let asleep = "SELECT count(*) FROM information_schema.processlist WHERE state = 'User sleep'";
        raw.query_first::<u64, _>(asleep).await.unwrap() == Some(1)
    })
    .await;
    server.kill();
    was_interrupted(purge);
    server.run();
    server.raw().await.query_drop("DROP TRIGGER hangs").await.unwrap();
    idem_at(&url, &["purge", "--batch", "1"]).ends(0).says("3 expired records removed from mysql");
    let rest = idem_at(&url, &["list", "--json"]).ends(0).json();
    assert_eq!(rest["key"], "pay/kept");
}

#[tokio::test]
async fn all_commands_work_on_a_dynamodb_table() {
    let emulator = Emulator::start(dynamo::Kind::Dynoxide);
    let url = format!("dynamodb://idempotency?region=eu-central-1&endpoint={}", emulator.endpoint());
    finds(&idem_at(&url, &["doctor", "--json"]).ends(1), "table", "error", "there is no table");
    idem_at(&url, &["schema", "diff"]).ends(4);
    idem_at(&url, &["schema", "migrate", "--yes", "--timeout", "60"]).ends(0);
    idem_at(&url, &["schema", "diff"]).ends(0);
    let store: DynamoStore = dynamo::open(&emulator.endpoint(), dynamo::TABLE);
    settles(&url, &store).await;
    let doctor = idem_at(&url, &["doctor", "--json"]);
    finds(&doctor, "table", "ok", "partition key");
    finds(&doctor, "ttl", "ok", "purge_at");
    finds(&doctor, "deletion protection", "warning", "off");
    let mut without = command(["show", "pay/42"]);
    run(without.env("IDEM_STORE", &url)).ends(2).complains("AWS_ACCESS_KEY_ID");
}

#[tokio::test]
async fn commands_work_on_a_partitioned_table_of_postgresql() {
    let server = PostgresServer::start();
    let url = server.url();
    let migrate = ["schema", "migrate", "--partitions", "4", "--yes"];
    idem_at(&url, &["schema", "diff", "--partitions", "4"]).ends(4);
    idem_at(&url, &migrate).ends(0);
    idem_at(&url, &migrate).ends(0);
    for diff in [&["schema", "diff"][..], &["schema", "diff", "--partitions", "4"]] {
        idem_at(&url, diff).ends(0);
    }
    settles(&url, &PostgresStore::connect(&url).await.unwrap()).await;
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    for check in
        ["schema", "dead rows", "fill factor", "updates", "autovacuum", "autovacuum threshold", "bloat", "probe"]
    {
        finds(&doctor, check, "ok", "");
    }
    // An existing table does not get another number of partitions.
    idem_at(&url, &["schema", "diff", "--partitions", "8"])
        .ends(1)
        .says("has 4 partitions, and shall have 8")
        .says("At size");
    idem_at(&url, &["schema", "diff", "--partitions", "0"]).ends(1).says("shall be plain");
    idem_at(&url, &["schema", "migrate", "--partitions", "8", "--yes"]).ends(1).complains("not changed in place");
    let other = format!("{url}?schema=plain");
    idem_at(&other, &["schema", "migrate", "--yes"]).ends(0);
    idem_at(&other, &["schema", "migrate", "--partitions", "8", "--yes"]).ends(1).complains("the table is plain");
    // The doctor finds a single partition with other settings.
    let raw = postgres::raw(&url).await;
    raw.batch_execute("ALTER TABLE idem.records_2 SET (autovacuum_enabled = off, fillfactor = 90)").await.unwrap();
    let doctor = idem_at(&url, &["doctor", "--json"]).ends(0);
    finds(&doctor, "fill factor", "warning", "90 of idem.records_2");
    finds(&doctor, "autovacuum", "warning", "off");
    raw.batch_execute("ALTER TABLE idem.records_2 RESET (fillfactor)").await.unwrap();
    idem_at(&url, &["schema", "diff"]).ends(1).says("the partition `records_2` has no fillfactor");
    // `schema print` and `schema migrate` define the same table.
    let print = ["schema", "print", "postgres", "--schema", "printed", "--partitions", "4"];
    let sql = idem_at(&url, &print).ends(0).out;
    raw.batch_execute(&format!("CREATE ROLE app; {sql}")).await.unwrap();
    idem_at(&format!("{url}?schema=printed"), &["schema", "diff", "--partitions", "4"]).ends(0);
    for wrong in [
        &["schema", "print", "sqlite", "--partitions", "4"][..],
        &["schema", "migrate", "--partitions", "129", "--yes"],
    ] {
        idem_at(&url, wrong).ends(2);
    }
}

/// Asserts that the doctor warns about `check`, with the text `found`, after the statement `bad`, and no longer after
/// the statement `mended`.
async fn warns(url: &str, check: &str, found: &str, bad: &str, mended: &str) {
    let raw = postgres::raw(url).await;
    raw.batch_execute(bad).await.unwrap();
    finds(&idem_at(url, &["doctor", "--json"]).ends(0), check, "warning", found);
    raw.batch_execute(mended).await.unwrap();
    finds(&idem_at(url, &["doctor", "--json"]).ends(0), check, "ok", "");
}

#[tokio::test]
async fn the_doctor_of_postgresql_finds_settings_that_are_slow_for_large_tables() {
    let server = PostgresServer::start();
    let url = server.url();
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0);
    let set = |settings: &str| format!("ALTER TABLE idem.records SET ({settings})");
    warns(&url, "fill factor", "90 of idem.records", &set("fillfactor = 90"), &set("fillfactor = 30")).await;
    warns(
        &url,
        "autovacuum",
        "off",
        &set("autovacuum_enabled = off"),
        "ALTER TABLE idem.records RESET (autovacuum_enabled)",
    )
    .await;
    // Sets the statistics that a table of a hundred million records would have.
    let size = "UPDATE pg_class SET reltuples = 1e8, relpages = 1e7 WHERE oid = 'idem.records'::regclass";
    let small = "UPDATE pg_class SET reltuples = 0, relpages = 0 WHERE oid = 'idem.records'::regclass";
    let fewer = format!("{size}; {}", set("autovacuum_vacuum_scale_factor = 0.005"));
    warns(&url, "autovacuum threshold", "20000050 dead rows in idem.records", size, &fewer).await;
    let slow = format!("{size}; {}", set("autovacuum_vacuum_cost_delay = 20"));
    warns(
        &url,
        "autovacuum pace",
        "hours",
        &slow,
        &set("autovacuum_vacuum_cost_limit = 2000, autovacuum_vacuum_cost_delay = 2"),
    )
    .await;
    let raw = postgres::raw(&url).await;
    raw.batch_execute(small).await.unwrap();
    // Completes records with results so large that the new versions of the rows don't fit into the pages of their
    // reservations.
    let rows = "INSERT INTO idem.records (key, owner, format, state, attempt, attempts_used, on_crash_fail, lapses_at, \
                expires_at, listed_at, first_seen_at, began_at) SELECT '1/pay/' || n, '\\x00112233445566778899aabbccddeeff', 1, \
                'pending', 1, 1, false, now(), now() + interval '1 day', now() + interval '1 day', now(), now() \
                FROM generate_series(1, 20000) AS n";
    raw.batch_execute(&set("fillfactor = 50")).await.unwrap();
    raw.batch_execute(rows).await.unwrap();
    let grow = "UPDATE idem.records SET state = 'completed', result = convert_to(repeat(md5(key), 20), 'UTF8')";
    raw.batch_execute(grow).await.unwrap();
    raw.batch_execute("ALTER TABLE idem.records SET (fillfactor = 30); SELECT pg_stat_force_next_flush()")
        .await
        .unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "updates", "warning", "of 100 updates stay in their page");
    raw.batch_execute("SELECT pg_stat_reset()").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "updates", "ok", "");
    // The doctor warns about expired records before a purge, and no longer after it.
    raw.batch_execute(
        "UPDATE idem.records SET listed_at = now() - interval '3 days', expires_at = now() - interval '3 days'",
    )
    .await
    .unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "purge", "warning", "the oldest 3 d");
    idem_at(&url, &["purge"]).ends(0).says("20000");
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "purge", "ok", "");
    // Leaves empty pages, with a single record in the last page.
    raw.batch_execute(&rows.replace("20000", "200000")).await.unwrap();
    raw.batch_execute(
        "DELETE FROM idem.records WHERE key <> (SELECT key FROM idem.records ORDER BY ctid DESC LIMIT 1)",
    )
    .await
    .unwrap();
    raw.batch_execute("VACUUM ANALYZE idem.records").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "bloat", "warning", "times the pages");
    raw.batch_execute("VACUUM (FULL, ANALYZE) idem.records").await.unwrap();
    finds(&idem_at(&url, &["doctor", "--json"]).ends(0), "bloat", "ok", "");
}
