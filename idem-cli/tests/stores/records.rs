//! Tests of the commands for records, with SQLite files.

use std::process::Stdio;
use std::time::Duration;

use idem_runtime::record::State;
use idem_runtime::testing::crash;
use idem_runtime::{Error, Key, Operation, Policy, Reconciliation, SqliteStore, Store};
use idem_tests::sqlite::{Folder, raw};
use serde_json::json;

use super::support::{
    Records, Run, command, completed, expired, idem_at, interrupted, key, on_terminal, pending, run, state,
};

fn hostname() -> String {
    let name = std::process::Command::new("uname").arg("-n").output().unwrap();
    String::from_utf8(name.stdout).unwrap().trim().to_owned()
}

#[tokio::test]
async fn show_prints_a_stuck_record_with_advice() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let shown = records.idem(&["show", "pay/42"]).ends(0).says("state        interrupted").says("idem resolve");
    assert!(shown.out.contains("attempt      1\n") && shown.err.is_empty(), "{shown:?}");
    let here = format!("held by      {}, process {}", hostname(), std::process::id());
    assert!(shown.out.contains(&here), "no `{here}` in {shown:?}");
    // The key is accepted as it is copied from a row, from an error, and from a shell.
    for typed in ["1/pay/42", "`pay/42`", " \"pay/42\" "] {
        let object = records.idem(&["show", typed, "--json"]).ends(0).json();
        assert_eq!(object["key"], "pay/42");
        assert_eq!(object["stored"], "1/pay/42");
        assert_eq!(object["store"], "sqlite");
        assert_eq!(object["state"], "interrupted");
        assert_eq!((&object["attempt"], &object["attempts_used"]), (&json!(1), &json!(1)));
        assert!(object["expires_in_ms"].as_u64().is_some_and(|left| left > 0 && left <= 3_600_000), "{object}");
    }
}

#[tokio::test]
async fn a_running_attempt_is_shown_with_its_lease() {
    let records = Records::new().await;
    pending(&records.store, "42").await;
    records
        .idem(&["show", "pay/42"])
        .ends(0)
        .says("lapses in 59 min")
        .says("on crash     fail")
        .says("begun        yes")
        .says("--break-lease");
    let object = records.idem(&["show", "pay/42", "--json"]).ends(0).json();
    assert_eq!((&object["lease_ms"], &object["ttl_ms"]), (&json!(3_600_000), &json!(3_600_000)));
    assert!(object["lapses_in_ms"].as_u64().is_some_and(|left| left > 3_000_000), "{object}");
    assert_eq!(object["on_crash"], "fail");
}

#[tokio::test]
async fn a_recorded_result_is_shown_only_with_the_option_result() {
    let records = Records::new().await;
    completed(&records.store, "42", br#"{"card":"4111"}"#).await;
    for json in [&[][..], &["--json"]] {
        let quiet = records.idem(&[&["show", "pay/42"], json].concat()).ends(0);
        assert!(!quiet.out.contains("4111"), "{quiet:?}");
        records.idem(&[&["show", "pay/42", "--result"], json].concat()).ends(0).says("4111");
    }
    let object = records.idem(&["show", "pay/42", "--result", "--json"]).json();
    assert_eq!(
        object["result"],
        json!({ "is": "encoded", "codec": "json", "bytes": 15, "text": r#"{"card":"4111"}"# })
    );
    interrupted(&records.store, "odd").await;
    let file = records.file(&[0, 255]);
    let resolve = ["resolve", "--completed", file.to_str().unwrap(), "--codec", "own", "--other-shape"];
    records.decides(&resolve, "pay/odd").ends(0);
    records.idem(&["show", "pay/odd", "--result"]).ends(0).says("\n(hex) 00ff\n");
    assert_eq!(records.idem(&["show", "pay/odd", "--result", "--json"]).json()["result"]["hex"], "00ff");
}

#[tokio::test]
async fn a_command_on_an_absent_record_exits_with_status_4() {
    let records = Records::new().await;
    for verb in [&["show"][..], &["reopen", "--yes"], &["forget", "--yes"], &["resolve", "--without-result", "--yes"]] {
        let text = [verb, &["pay/42"]].concat();
        records.idem(&text).ends(4).complains("key `pay/42` in sqlite: there is no record");
        let error = records.idem(&[&text[..], &["--json"]].concat()).ends(4).error();
        assert_eq!((&error["error"], &error["status"]), (&json!("nothing_found"), &json!(4)));
    }
}

#[tokio::test]
async fn an_interrupted_operation_is_resolved_with_its_result() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let file = records.file(b" {\"receipt\": 7}\n");
    let file = file.to_str().unwrap();
    let seen = records.revision("pay/42");
    let resolve = ["resolve", "pay/42", "--seen", &seen, "--completed", file, "--reason", "INC-7", "--yes"];
    let done = records.idem(&[&resolve[..], &["--json"]].concat()).ends(0).json();
    assert_eq!(done, json!({ "key": "pay/42", "store": "sqlite", "action": "resolve", "attempt": 1 }));
    let found = records.store.inspect(&key("42")).await.unwrap().unwrap();
    let State::Completed(result) = &found.record.state else { panic!("{found:?}") };
    assert_eq!(result.stored_bytes(), br#"{"receipt": 7}"#.len(), "without the white space around it");
    assert_eq!((found.decided_by(), found.decided_reason()), (Some("alice"), Some("INC-7")));
    records.idem(&["show", "pay/42"]).says("decided by   alice: INC-7\n");
    // A repetition of the decision changes nothing; another result is refused.
    records.idem(&resolve).ends(0).says("resolved `pay/42`");
    let file = records.file(b"{\"receipt\": 8}");
    records.idem(&resolve).ends(1).complains("alice has decided about it, and it is completed; nothing was changed");
    let resolve = ["resolve", "--completed", file.to_str().unwrap()];
    records.decides(&resolve, "pay/42").ends(1).complains("what it recorded stands; replace the result");
    assert_eq!(records.store.inspect(&key("42")).await.unwrap().unwrap().record.state, found.record.state);
    let replaced = records.decides(&[&resolve[..], &["--replace"]].concat(), "pay/42").ends(0);
    replaced.says("in place of what was recorded");
    records.idem(&["show", "pay/42", "--result"]).ends(0).says("{\"receipt\": 8}");
}

#[tokio::test]
async fn the_second_of_two_decisions_about_the_same_revision_is_refused() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let seen = records.revision("pay/42");
    let decide =
        |verb: &[&str], by: &str| records.idem(&[verb, &["pay/42", "--seen", &seen, "--by", by, "--yes"]].concat());
    decide(&["resolve", "--without-result"], "alice").ends(0);
    for verb in [&["reopen"][..], &["discard"], &["forget"], &["resolve", "--without-result=failed"]] {
        let refused = decide(verb, "bob").ends(1);
        refused.complains("alice has decided about it, and it is completed; nothing was changed");
        assert_eq!(state(&records.store, "42").await, Some("completed"));
    }
    // A decision without `--seen` is refused.
    records.idem(&["discard", "pay/42", "--yes"]).ends(2).complains("add `--seen`");
    records.idem(&["discard", "pay/42", "--yes", "--seen", "1"]).ends(2).complains("a revision is");
    // Only `discard` removes a result.
    records
        .decides(&["reopen"], "pay/42")
        .ends(1)
        .complains("discard the result if that is to be given up (`idem discard`)");
    records.decides(&["discard"], "pay/42").ends(0).says("the next delivery runs again");
    records.decides(&["discard"], "pay/42").ends(1).complains("has recorded no result");
}

#[tokio::test]
async fn resolve_records_each_kind_of_end_of_an_operation() {
    let records = Records::new().await;
    let file = records.file(b"\"declined\"");
    let file = file.to_str().unwrap();
    for (at, (end, expected)) in [
        (&["--without-result"][..], "completed"),
        (&["--without-result=completed"], "completed"),
        (&["--without-result=failed"], "failed"),
        (&["--failed", file], "failed"),
        (&["--completed", file, "--codec", "msgpack"], "completed"),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("{at}");
        interrupted(&records.store, &name).await;
        records.decides(&[&["resolve"], end].concat(), &format!("pay/{name}")).ends(0);
        assert_eq!(state(&records.store, &name).await, Some(expected), "{end:?}");
    }
    records.idem(&["resolve", "pay/0", "--yes"]).ends(2).complains("--completed <FILE>");
    records.idem(&["resolve", "pay/0", "--failed", file, "--without-result"]).ends(2).complains("cannot be used with");
}

#[tokio::test]
async fn a_result_file_that_does_not_decode_is_refused_and_not_quoted() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let file = records.file(b"{\"card\": 4111-2222}");
    let resolve = |file: &str| records.idem(&["resolve", "pay/42", "--yes", "--completed", file]).ends(2);
    let refused = resolve(file.to_str().unwrap()).complains("it is not JSON, at line 1 column 14");
    assert!(!refused.err.contains("4111"), "{refused:?}");
    records.file(b"");
    resolve(file.to_str().unwrap()).complains("it is not JSON");
    resolve("/nowhere/result").complains("No such file");
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
}

#[tokio::test]
async fn a_request_is_answered_with_the_response_that_an_operator_gave() {
    use axum::body::Body;
    use axum::routing::post;
    use http_body_util::BodyExt as _;
    use idem_runtime::http::{Caller, IdempotencyLayer};
    use idem_runtime::{OnCrash, Policy, StoreExt as _};
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::sync::Semaphore;
    use tower::ServiceExt as _;

    let records = Records::new().await;
    let began = Arc::new(Semaphore::new(0));
    // Each call starts a new server on the same file.
    let serve = async || {
        let store = SqliteStore::open(records.folder.file()).await.unwrap();
        let policy = Policy::new(Duration::from_secs(3600)).on_crash(OnCrash::Fail);
        let layer = IdempotencyLayer::new(&store, policy, Caller::single());
        let began = Arc::clone(&began);
        let pay = async move || {
            began.add_permits(1);
            std::future::pending::<&'static str>().await
        };
        (store, axum::Router::new().route("/payments", post(pay)).layer(layer))
    };
    let request = || {
        let request = http::Request::post("/payments").header("idempotency-key", "\"order-42\"");
        request.body(Body::from("{\"amount\":7}")).unwrap()
    };
    let (store, server) = serve().await;
    let running = tokio::spawn(server.oneshot(request()));
    began.acquire().await.unwrap().forget();
    let listed = records.idem(&["list", "--json"]).ends(0).lines();
    let shown = listed[0]["key"].as_str().unwrap().to_owned();
    assert!(shown.ends_with("order-42"), "{shown}");
    let shown = shown.as_str();
    // The process is gone. An operator knows this, and has the bank's answer.
    crash(&store);
    records.decides(&["release", "--break-lease"], shown).ends(0);
    let body = b"{\"paid\":true,\n \"note\":\"\xc3\xbc\x00\"}\n\n";
    let head = format!(
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/2 201 \r\nlocation: /payments/7\r\nX-Mark: a:b \r\nx-mark: c\r\n\
                date: Tue, 01 Jan 2030 00:00:00 GMT\r\nset-cookie: s=1\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let file = records.file(&[head.as_bytes(), body].concat());
    let file = file.to_str().unwrap();
    let seen = records.revision(shown);
    let resolve = ["resolve", shown, "--seen", &seen, "--http-response", file, "--yes"];
    records.idem(&resolve).ends(0).says("resolved");
    running.abort();
    drop(running.await);
    drop(store);

    let (store, server) = serve().await;
    for _ in 0..2 {
        let response = server.clone().oneshot(request()).await.unwrap();
        assert_eq!(response.status(), 201);
        let header = |name: &str| -> Vec<_> {
            response.headers().get_all(name).iter().map(|value| value.to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(header("location"), ["/payments/7"]);
        assert_eq!(header("x-mark"), ["a:b", "c"]);
        assert_eq!(header("content-length"), [body.len().to_string()]);
        assert_eq!(header("idempotent-replayed"), ["true"]);
        assert_eq!((header("set-cookie"), header("date")), (vec![], vec![]), "they belong to one exchange");
        assert_eq!(response.into_body().collect().await.unwrap().to_bytes(), &body[..]);
    }
    assert_eq!(began.available_permits(), 0, "no handler has run again");
    store.flush().await;

    // A repetition of the decision changes nothing, and `show` prints the response as given.
    records.idem(&resolve).ends(0);
    let shown_again =
        records.idem(&["show", shown, "--result"]).ends(0).says("HTTP/1.1 201 Created\nlocation: /payments/7\n");
    let hex = body.iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"));
    assert!(shown_again.out.contains(&format!("\n\n(hex) {hex}")), "{shown_again:?}");
    let object = records.idem(&["show", shown, "--result", "--json"]).json();
    assert_eq!((&object["result"]["codec"], &object["result"]["http"]["status"]), (&json!("http1"), &json!(201)));
    assert_eq!(object["result"]["http"]["headers"][0], json!(["location", "/payments/7"]));
    assert_eq!(object["result"]["http"]["hex"], hex);
}

#[tokio::test]
async fn a_file_that_is_no_http_response_is_refused_and_not_quoted() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    for (content, problem) in [
        ("", "line 1 is no status line"),
        ("{\"card\":4111}", "line 1 is no status line"),
        ("card: 4111\r\n\r\n", "line 1 is no status line"),
        ("HTTP/1.1 4111 Card\r\n\r\n", "line 1 is no status line"),
        ("HTTP/1.1 777 4111\r\n\r\n", "line 1 is no status line"),
        ("HTTP/1.1\r\n\r\n4111", "line 1 is no status line"),
        ("HTTP/1.1 200 OK", "it ends before the empty line"),
        ("HTTP/1.1 200 OK\r\ncard: 4111\r\n", "it ends before the empty line"),
        ("HTTP/1.1 100 Continue\r\n\r\n", "it ends before the empty line"),
        ("HTTP/1.1 200 OK\na: b\n4111\n\n", "line 3 is no header"),
        ("HTTP/1.1 200 OK\na: b\n 4111: folded\n\n", "line 3 is no header"),
        ("HTTP/1.1 200 OK\ncontent-length: 4\n\n4111\n", "not that of its body, which has 5 bytes"),
        ("HTTP/1.1 200 OK\ncontent-encoding: gzip\n\n4111", "it is compressed"),
        ("HTTP/1.1 204 No Content\n\n4111", "a response with the status 204 has no body"),
        ("HTTP/1.1 200 Connection established\n\nHTTP/1.1 201 Created\n\n4111", "another status line"),
    ] {
        let file = records.file(content.as_bytes());
        let resolve = ["resolve", "pay/42", "--yes", "--http-response", file.to_str().unwrap()];
        let refused = records.idem(&resolve).ends(2).complains(problem);
        assert!(!refused.err.contains("4111") && refused.out.is_empty(), "{content}: {refused:?}");
        assert_eq!(records.idem(&[&resolve[..], &["--json"]].concat()).ends(2).error()["error"], "usage");
    }
    let both = ["resolve", "pay/42", "--http-response", "-", "--codec", "own"];
    records.idem(&both).ends(2).complains("cannot be used with");
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    // The smallest valid response is accepted.
    let file = records.file(b"HTTP/1.0 204\n\n");
    records.decides(&["resolve", "--http-response", file.to_str().unwrap()], "pay/42").ends(0);
    records.idem(&["show", "pay/42", "--result"]).ends(0).says("HTTP/1.1 204 No Content\n");
}

#[tokio::test]
async fn only_release_breaks_a_live_lease() {
    let records = Records::new().await;
    let lease = pending(&records.store, "42").await;
    for verb in [&["reopen"][..], &["forget"], &["resolve", "--without-result"]] {
        records.decides(verb, "pay/42").ends(1).complains("attempt 1 is running; nothing was changed");
    }
    records.idem(&["release", "pay/42", "--yes"]).ends(2).complains("--break-lease");
    assert_eq!(state(&records.store, "42").await, Some("pending"));
    let seen = records.revision("pay/42");
    for _ in 0..2 {
        let ended = records.idem(&["release", "--break-lease", "pay/42", "--seen", &seen, "--yes"]).ends(0);
        ended.says("ended the lease");
        assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    }
    let late = idem_runtime::store::renew_all(&records.store, &[lease]).await.unwrap();
    assert_eq!(late, [idem_runtime::store::Verdict::Refused]);
    let seen = records.revision("pay/42");
    for _ in 0..2 {
        records.idem(&["reopen", "pay/42", "--seen", &seen, "--yes"]).ends(0).says("the next delivery runs again");
        assert_eq!(state(&records.store, "42").await, Some("released"));
    }
}

#[tokio::test]
async fn a_decision_about_a_record_that_has_changed_is_refused() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let seen = records.revision("pay/42");
    for attempt in ["2", "7"] {
        let other = seen.replacen('1', attempt, 1);
        let refused = records.idem(&["forget", "pay/42", "--seen", &other, "--yes", "--json"]).ends(1).error();
        assert_eq!(refused["error"], "refused");
        assert!(refused["message"].as_str().unwrap().contains("the latest attempt is 1, not"), "{refused}");
    }
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    records.idem(&["forget", "pay/42", "--seen", &seen, "--yes"]).ends(0).says("forgot `pay/42`");
    assert_eq!(state(&records.store, "42").await, None);
    records.idem(&["forget", "pay/42", "--seen", &seen, "--yes"]).ends(4);
}

#[tokio::test]
async fn an_uncertain_record_shows_the_questions_to_its_reconciler_and_the_last_answer() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let listed = || records.idem(&["list", "--uncertain"]).ends(0);
    assert!(!listed().out.contains("reconciler asked"), "{:?}", listed());
    for times in ["once", "2 times"] {
        let policy = Policy::new(Duration::from_secs(3600));
        let asking = async { Ok(Reconciliation::Unknown { ask_again: Duration::from_secs(60) }) };
        let operation = Operation::new(&records.store, Key::new("pay", 42), policy).reconcile(asking);
        operation.run(async { Ok::<_, Error>(7) }).await.unwrap_err();
        for shown in [listed(), records.idem(&["show", "pay/42"]).ends(0)] {
            shown.says(&format!("reconciler asked {times}, the last one ")).says(" ago did not settle it");
        }
    }
    let object = records.idem(&["show", "pay/42", "--json"]).ends(0).json();
    assert_eq!((&object["reconciliations"], &object["attempts_used"]), (&json!(2), &json!(1)));
    // A decision of an operator settles the doubt, and the count of questions begins again.
    records.idem(&["reopen", "pay/42", "--seen", object["revision"].as_str().unwrap(), "--yes"]).ends(0);
    let object = records.idem(&["show", "pay/42", "--json"]).ends(0).json();
    assert_eq!(object["reconciliations"], 0);
}

#[tokio::test]
async fn without_a_terminal_a_decision_asks_for_no_confirmation() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    for verb in [&["reopen"][..], &["forget"], &["resolve", "--without-result"], &["release", "--break-lease"]] {
        let refused = records.idem(&[verb, &["pay/42"]].concat()).ends(2);
        refused.complains("nobody can be asked here; nothing was changed; add --yes");
    }
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
}

#[tokio::test]
async fn on_a_terminal_a_decision_asks_for_confirmation() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let line = format!("{} reopen pay/42 --store {}", env!("CARGO_BIN_EXE_idem"), records.url());
    let ask = |answer| on_terminal(&line, answer);
    for answer in ["n\n", "\n"] {
        let (status, said) = ask(answer);
        assert_eq!(status, 1, "{said}");
        assert!(
            said.contains("Reopen `pay/42`, attempt 1? [y/N]") && said.contains("state        interrupted"),
            "{said}"
        );
        assert!(said.contains("nothing was changed"), "{said}");
        assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    }
    let (status, said) = ask("y\n");
    assert_eq!(status, 0, "{said}");
    assert_eq!(state(&records.store, "42").await, Some("released"));
    // The question names the result that would be lost.
    completed(&records.store, "43", b"7").await;
    for (verb, question) in [("discard", "Let `pay/43`, attempt 1 run again"), ("forget", "Forget `pay/43`, attempt 1")]
    {
        let line = format!("{} {verb} pay/43 --store {}", env!("CARGO_BIN_EXE_idem"), records.url());
        let (status, said) = on_terminal(&line, "n\n");
        assert_eq!(status, 1, "{said}");
        assert!(
            said.contains(&format!("{question}, and give up that it completed (result: 1 bytes of json)?")),
            "{said}"
        );
    }
}

#[tokio::test]
async fn purge_removes_only_expired_records() {
    let records = Records::new().await;
    // The expired records come last: each reservation removes up to two earlier ones, and some must remain for `purge`.
    interrupted(&records.store, "kept").await;
    for at in 0..3 {
        expired(&records.store, &at.to_string()).await;
    }
    let rows = || -> i64 {
        raw(&records.folder.file()).query_row("SELECT count(*) FROM idem_records", [], |row| row.get(0)).unwrap()
    };
    let before = rows();
    assert!(before > 1, "something is left to remove");
    let limited = records.idem(&["purge", "--limit", "1", "--json"]).ends(0).json();
    assert_eq!(limited, json!({ "store": "sqlite", "action": "purge", "removed": 1 }));
    let rest = records.idem(&["purge", "--batch", "1", "--json"]).ends(0).json();
    assert_eq!(rest["removed"].as_i64(), Some(before - 2));
    assert_eq!(rows(), 1);
    assert_eq!(state(&records.store, "kept").await, Some("interrupted"));
}

#[tokio::test]
async fn a_failed_purge_reports_its_progress_and_another_purge_finishes() {
    let records = Records::new().await;
    for at in 0..6 {
        expired(&records.store, &at.to_string()).await;
    }
    let file = raw(&records.folder.file());
    let fails = "CREATE TRIGGER fails BEFORE DELETE ON idem_records WHEN (SELECT count(*) FROM idem_records) = 1
                 BEGIN SELECT RAISE(ABORT, 'no more'); END";
    file.execute_batch(fails).unwrap();
    let before: i64 = file.query_row("SELECT count(*) FROM idem_records", [], |row| row.get(0)).unwrap();
    let failed = records.idem(&["purge", "--batch", "1"]).ends(3);
    failed.complains(&format!("{} expired records were removed before that: repeat it", before - 1));
    file.execute_batch("DROP TRIGGER fails").unwrap();
    records.idem(&["purge"]).ends(0).says("1 expired records removed from sqlite");
}

#[tokio::test]
async fn a_missing_store_is_not_created() {
    let folder = Folder::new();
    let missing = folder.path().join("missing.db");
    idem_at(&format!("sqlite:{}", missing.display()), &["show", "pay/42"]).ends(3).complains("No such file");
    assert!(!missing.exists());
    idem_at(&format!("sqlite:{}", folder.path().display()), &["show", "pay/42"]).ends(3).complains("is not a file");
    // The command leaves a file of another program unchanged.
    let theirs = folder.path().join("theirs.db");
    raw(&theirs).execute_batch("CREATE TABLE orders (id INTEGER)").unwrap();
    let before = std::fs::read(&theirs).unwrap();
    idem_at(&format!("sqlite:{}", theirs.display()), &["show", "pay/42"]).ends(3).complains("there is no table");
    assert_eq!(std::fs::read(&theirs).unwrap(), before);
    std::fs::write(&theirs, [7; 4096]).unwrap();
    idem_at(&format!("sqlite:{}", theirs.display()), &["show", "pay/42"]).ends(3).complains("not a database");
}

#[tokio::test]
async fn the_url_of_a_sqlite_store_can_name_another_table() {
    let folder = Folder::new();
    let url = format!("sqlite:{}?table=shop", folder.file().display());
    idem_at(&url, &["schema", "migrate"]).ends(2).complains("add --yes");
    idem_at(&url, &["schema", "migrate", "--yes"]).ends(0).says("sqlite has what this release needs");
    let store = SqliteStore::options().table("shop").open(folder.file()).await.unwrap();
    interrupted(&store, "42").await;
    idem_at(&url, &["show", "pay/42"]).ends(0).says("interrupted");
    idem_at(&url, &["schema", "diff"]).ends(0).says("as this release needs it");
    let other = format!("sqlite:{}", folder.file().display());
    idem_at(&other, &["schema", "diff"]).ends(4).complains("there is no table");
}

#[tokio::test]
async fn a_damaged_record_is_shown_listed_and_only_forgotten() {
    let records = Records::new().await;
    completed(&records.store, "a", b"1").await;
    completed(&records.store, "b", br#"{"card":"4111"}"#).await;
    let file = raw(&records.folder.file());
    file.execute_batch("UPDATE idem_records SET state = 'half done' WHERE key = '1/pay/b'").unwrap();
    // The damage is shown, without the content of the record.
    let shown = records.idem(&["show", "pay/b"]).ends(0).says("state        damaged: the record is damaged");
    shown.says("what now     every delivery fails until you decide").says("`idem forget`");
    let object = records.idem(&["show", "pay/b", "--result", "--json"]).ends(0).json();
    assert_eq!(
        (&object["state"], &object["standing"], &object["attempt"]),
        (&json!("damaged"), &json!("damaged"), &json!(0))
    );
    assert!(object["damage"].as_str().is_some_and(|why| why.contains("damaged")), "{object}");
    assert!(object["expires_in_ms"].is_null() && object.get("result").is_none(), "{object}");
    assert!(!object.to_string().contains("4111") && !object.to_string().contains("half done"), "{object}");

    assert_eq!(keys(&records.idem(&["list", "--json"]).ends(0)), ["pay/a", "pay/b"]);
    // Listings and counts include the record.
    for which in [&["--uncertain"][..], &["--state", "damaged"]] {
        let listed = records.idem(&[&["list", "--json"], which].concat()).ends(0);
        assert_eq!(keys(&listed), ["pay/b"], "{which:?}");
        assert_eq!(listed.json()["revision"], object["revision"], "{which:?}");
    }
    records.idem(&["stats"]).ends(0).says("1 completed, 1 damaged");
    records.idem(&["watch", "--times", "1"]).ends(0).says("0 interrupted, 1 damaged\ndamaged");

    // Every decision but `forget` is refused.
    let file_of_result = records.file(b"7");
    let result = ["--completed", file_of_result.to_str().unwrap()];
    for verb in [
        &["reopen"][..],
        &["discard"],
        &["release", "--break-lease"],
        &[&["resolve"], &result[..]].concat(),
        &[&["resolve", "--replace"], &result[..]].concat(),
    ] {
        records.decides(verb, "pay/b").ends(1).complains("nothing was changed; find out whether the effect happened");
    }
    records.idem(&["forget", "--prefix", "pay/b", "--yes"]).ends(1).says("left         pay/b").complains("are damaged");
    records
        .idem(&["forget", "pay/b"])
        .ends(2)
        .complains("Forget `pay/b`, which is damaged, whether its handler is running");
    // The record is written again after its revision was read, and is still damaged.
    let seen = records.revision("pay/b");
    file.execute_batch("UPDATE idem_records SET state = 'half gone' WHERE key = '1/pay/b'").unwrap();
    let stale = records.idem(&["forget", "pay/b", "--seen", &seen, "--yes"]).ends(1);
    stale.complains("it was written again, and is damaged as before");
    records
        .decides(&["forget"], "pay/b")
        .ends(0)
        .says("forgot `pay/b`, which was damaged; the next delivery runs as the first");
    records.idem(&["show", "pay/b"]).ends(4);
}

#[tokio::test]
async fn stores_of_a_later_version_are_left_alone() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let file = raw(&records.folder.file());
    file.execute_batch("ALTER TABLE idem_records ADD COLUMN later TEXT").unwrap();
    records.idem(&["show", "pay/42"]).ends(3).complains("columns of a later release (later)");
    records.idem(&["schema", "diff"]).ends(1).says("the column `later` is not of this release");
    let findings = records.idem(&["doctor", "--json"]).ends(1).lines();
    assert!(findings.iter().any(|it| it["check"] == "open" && it["level"] == "error"), "{findings:?}");
}

#[tokio::test]
async fn errors_of_wrong_use_show_no_passwords() {
    let records = Records::new().await;
    let verb = ["show", "pay/42"];
    for (url, text) in [
        ("nonsense", "the store is no URL"),
        ("", "which store?"),
        ("mongodb://bob:secret@host/db", "unknown scheme `mongodb:`"),
        ("mysql://bob:secret@host", "write `mysql://"),
        ("sqlite:", "the path of a file"),
        ("sqlite::memory:", "the path of a file"),
        ("sqlite:a.db?table=no-name", "letters, digits and `_`"),
        ("redis://bob:secret@host:port/0", "write `redis://"),
        ("redis-cluster://bob:secret@a,,b", "a host is missing"),
        ("redis-sentinel://bob:secret@a", "the name of the primary is missing"),
        ("postgres://bob:secret@host:port/db", "write `postgres://"),
        ("postgres://bob:secret@host/db?pgbouncer=maybe", "`pgbouncer` is `true` or `false`"),
        ("nats://bob:secret@/orders", "write `nats://"),
        ("nats://bob:secret@h/a.b", "the name of a bucket"),
        ("nats://bob:secret@h/b?user=x", "its parameter is `credentials`"),
        ("dynamodb://x", "the name of a table"),
        ("dynamodb://records?region=r&endpoint=secret", "`endpoint` begins with"),
        ("dynamodb://records", "say which region"),
    ] {
        let refused = idem_at(url, &verb).ends(2).complains(text);
        assert!(!refused.err.contains("secret"), "{refused:?}");
    }
    for (key, text) in [("order42", "is no key"), ("", "is no key"), ("shop:1/pay/42", "leave out the namespace")] {
        records.idem(&["show", key]).ends(2).complains(text);
    }
    // No password is shown, even if a URL stands in the wrong place.
    for arguments in [
        &["show", "redis://bob:secret@host", "x"][..],
        &["redis://bob:secret@host"],
        &["show", "--stroe=redis://:secret@h"],
    ] {
        let refused = records.idem(arguments).ends(2);
        assert!(!refused.err.contains("secret"), "{refused:?}");
    }
    let refused = records.idem(&["show", "redis://bob:secret@host"]).ends(4);
    assert!(!refused.err.contains("secret"), "{refused:?}");
}

#[test]
fn a_command_on_an_unreachable_store_exits_with_status_3() {
    for url in [
        "redis://bob:secret@127.0.0.1:1",
        "redis-cluster://bob:secret@127.0.0.1:1",
        "redis-sentinel://bob:secret@127.0.0.1:1/main",
        "postgres://bob:secret@127.0.0.1:1/db",
        "mysql://bob:secret@127.0.0.1:1/db",
        "nats://bob:secret@127.0.0.1:1/orders",
        "dynamodb://records?region=eu-central-1&endpoint=http://127.0.0.1:1",
    ] {
        for verb in [&["show", "pay/42", "--timeout", "2"][..], &["doctor", "--timeout", "2"]] {
            let away = idem_at(url, verb).ends(3);
            assert!(!away.err.contains("secret") && !away.err.is_empty(), "{away:?}");
            let error = idem_at(url, &[verb, &["--json"]].concat()).ends(3).error();
            assert_eq!(error["error"], "unreachable");
        }
    }
}

#[test]
fn a_closed_output_pipe_ends_the_program_without_a_message() {
    for arguments in
        [&["schema", "print", "sqlite"][..], &["key", "pay/42"], &["man"], &["completions", "bash"], &["--help"]]
    {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            command(arguments).stdout(writer).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(141), "{arguments:?}");
        assert!(output.stderr.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[tokio::test]
async fn an_output_pipe_that_closes_midway_ends_the_program_without_a_message() {
    use std::io::BufRead;
    let records = Records::new().await;
    // The list is longer than the buffer of a pipe.
    for at in 0..400 {
        interrupted(&records.store, &at.to_string()).await;
    }
    let mut list = command(["list", "--json", "--limit", "1000"]);
    list.env("IDEM_STORE", records.url()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = list.spawn().unwrap();
    let mut first = String::new();
    // Reads one line, like `head -n 1`.
    std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.starts_with('{'), "{first}");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[tokio::test]
async fn a_terminal_of_forty_columns_shows_stuck_records() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let idem = format!("{} --store {}", env!("CARGO_BIN_EXE_idem"), records.url()).replacen(
        " --store",
        " watch --times 1 --store",
        1,
    );
    let (status, screen) = on_terminal(&format!("stty cols 40 rows 12; {idem}"), "");
    assert_eq!(status, 0, "{screen}");
    // The screen draws each cell at its position, with control sequences in between.
    for text in ["sqlite,", "lapsed,", "interrupted", "state", "pay/42", "scroll"] {
        assert!(screen.contains(text), "no `{text}` in {screen:?}");
    }
    let plain = on_terminal(&format!("stty cols 40 rows 12; {idem} --plain"), "");
    assert!(plain.0 == 0 && plain.1.contains("pay/42, attempt 1"), "{plain:?}");
}

#[tokio::test]
async fn keys_printed_by_idem_key_equal_the_keys_of_handlers() {
    use idem_runtime::{Error, MemoryStore, idempotent};

    #[idempotent(key = "order:{tenant}:{id}", ttl = "1h", store = store, scope = "ship", on_error = release)]
    async fn ship(store: &MemoryStore, tenant: &str, id: u32) -> Result<String, Error> {
        Ok(idem_runtime::current()?.key().as_str().to_owned())
    }
    #[idempotent(key = (tenant, id), ttl = "1h", store = store, scope = "bill")]
    async fn bill(store: &MemoryStore, tenant: &str, id: u32) -> Result<String, Error> {
        Ok(idem_runtime::current()?.key().as_str().to_owned())
    }
    let store = MemoryStore::new();
    for tenant in ["acme", "a:b", "100%", "ü b"] {
        let asked = |arguments: &[&str]| run(&mut command(arguments)).ends(0).json()["stored"].clone();
        let template = ["key", "--scope", "ship", "--template", "order:{t}:{id}", tenant, "42", "--json"];
        assert_eq!(asked(&template), ship(&store, tenant, 42).await.unwrap());
        let tuple = ["key", "--scope", "bill", "--tuple", tenant, "42", "--json"];
        assert_eq!(asked(&tuple), bill(&store, tenant, 42).await.unwrap());
    }
    for (wrong, text) in [
        (&["--scope", "s", "--template", "a{b", "1"][..], "is not closed"),
        (&["--scope", "s", "--template", "{a}{b}", "1", "2"], "side by side"),
        (&["--scope", "s", "--template", "{a}:{b}", "1"], "2 places for values, 1 are given"),
        (&["--scope", "s/t", "1"], "the scope must have"),
        (&["--scope", "s", " "], "empty or blank"),
        (&["order42"], "is no key"),
        (&["--template", "{a}", "1"], "--scope"),
    ] {
        run(&mut command([&["key"], wrong].concat())).ends(2).complains(text);
    }
}

#[test]
fn keys_printed_by_idem_key_for_requests_equal_the_keys_of_the_layer() {
    let asked = |arguments: &[&str]| run(&mut command([&["key", "--http"], arguments].concat())).ends(0);
    let of = ["--route", "/payments", "--caller", "alice"];
    let expected = "key     'http/POST /payments:alice:order-42'\n";
    for typed in ["order-42", "\"order-42\""] {
        asked(&[&of[..], &[typed]].concat()).says(expected);
    }
    asked(&["--scope", "api", "--method", "PUT", "k"]).says("api/PUT::k");
    let redis = ["k", "--store", "redis://bob:secret@host", "--namespace", "shop:"];
    let shown = asked(&redis).says("stored  shop:1/http/POST::k");
    let shown = shown.says("redis   redis-cli -h host -p 6379 --user bob PTTL shop:1/http/POST::k\n");
    assert!(!shown.out.contains("secret"));
    asked(&["k", "--store", "postgres://h/d?schema=s"]).says(
        r#"postgres psql -h h -p 5432 -d d -x -c 'SELECT * FROM "s".records WHERE key = '\''1/http/POST::k'\'''"#,
    );
}

#[test]
fn shell_completions_and_manual_pages_name_every_subcommand() {
    let verbs = ["doctor", "show", "resolve", "reopen", "forget", "release", "purge", "key", "schema", "conformance"];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&mut command(["completions", shell])).ends(0).out;
        assert!(verbs.iter().all(|verb| script.contains(verb)), "{shell}");
    }
    run(&mut command(["completions", "cmd"])).ends(2);
    let page = run(&mut command(["man"])).ends(0).out;
    assert!(
        page.contains(".TH idem 1") && verbs.iter().all(|verb| page.contains(&format!("idem\\-{verb}(1)"))),
        "{page}"
    );
    let folder = Folder::new();
    run(&mut command(["man", "--dir", folder.path().to_str().unwrap()])).ends(0);
    for verb in verbs {
        assert!(folder.path().join(format!("idem-{verb}.1")).exists(), "{verb}");
    }
}

#[test]
fn schema_print_needs_no_server() {
    let print = |arguments: &[&str]| run(&mut command([&["schema", "print"], arguments].concat())).ends(0);
    print(&["postgres", "--schema", "shop", "--login", "o\"k"])
        .says(r#"CREATE TABLE IF NOT EXISTS "shop".records"#)
        .says(r#"GRANT SELECT, INSERT, UPDATE ON "shop".records TO "o""k";"#);
    print(&["sqlite", "--table", "shop"]).says(r#"CREATE TABLE IF NOT EXISTS "shop""#);
    let parts = print(&["dynamodb", "--table", "shop", "--json"]).lines();
    let text = |at: usize| serde_json::from_str::<serde_json::Value>(parts[at]["text"].as_str().unwrap()).unwrap();
    assert_eq!(text(0)["Resources"]["IdempotencyTable"]["Properties"]["TableName"], "shop");
    assert_eq!(text(1)["Statement"][0]["Action"].as_array().unwrap().len(), 3);
    let parts = print(&["nats", "--table", "shop", "--json"]).lines();
    let text = |at: usize| serde_json::from_str::<serde_json::Value>(parts[at]["text"].as_str().unwrap()).unwrap();
    assert_eq!(text(0)["subjects"][0], "$KV.shop.>");
    assert_eq!(text(1)["handlers"]["publish"][2], "$JS.API.STREAM.MSG.GET.KV_shop");
    run(&mut command(["schema", "print", "redis"])).ends(2);
}

/// Returns the keys of the listed records.
fn keys(run: &Run) -> Vec<String> {
    run.lines().iter().filter_map(|it| Some(it["key"].as_str()?.to_owned())).collect()
}

#[tokio::test]
async fn stuck_records_are_listed_page_by_page() {
    let records = Records::new().await;
    for at in 0..5 {
        interrupted(&records.store, &format!("stuck:{at}")).await;
        completed(&records.store, &format!("done:{at}"), b"\"4111\"").await;
    }
    pending(&records.store, "runs").await;
    let list = |arguments: &[&str]| records.idem(&[&["list", "--json"], arguments].concat());
    assert_eq!(list(&[]).ends(0).lines().len(), 11);
    let stuck = list(&["--state", "interrupted"]).ends(0);
    assert_eq!(keys(&stuck), (0..5).map(|at| format!("pay/stuck:{at}")).collect::<Vec<_>>());
    assert_eq!(keys(&list(&["--uncertain"])), keys(&stuck));
    assert_eq!(keys(&list(&["--state", "running"])), ["pay/runs"]);
    assert!(!list(&["--state", "completed"]).ends(0).out.contains("4111"), "a list shows no results");
    // Reading page by page shows each record once.
    let mut seen = Vec::new();
    let mut after = String::new();
    loop {
        let page = match after.as_str() {
            "" => list(&["--limit", "2"]),
            after => list(&["--limit", "2", "--after", after]),
        };
        seen.extend(keys(&page));
        match page.lines().last().and_then(|last| Some(last["next"].as_str()?.to_owned())) {
            Some(next) => after = next,
            None => break,
        }
    }
    assert_eq!(seen, keys(&list(&[])));
    records
        .idem(&["list", "--limit", "2"])
        .ends(0)
        .says("pay/done:0")
        .complains("There may be more: --after 1/pay/done:1\n");
    list(&["--scope", "ship"]).ends(4);
    list(&["--older-than", "1h"]).ends(4);
    for (wrong, text) in
        [(["--state", "stuck"], "it is one of running, lapsed"), (["--older-than", "soon"], "as `15m`")]
    {
        list(&wrong).ends(2).complains(text);
    }
}

#[tokio::test]
async fn records_are_counted_by_scope() {
    let records = Records::new().await;
    for at in 0..3 {
        completed(&records.store, &format!("done:{at}"), b"1").await;
    }
    interrupted(&records.store, "stuck").await;
    let counts = records.idem(&["stats", "--json"]).ends(0).lines();
    assert_eq!(counts.len(), 2);
    for (line, scope) in counts.iter().zip([json!("pay"), json!(null)]) {
        assert_eq!(line["scope"], scope);
        assert_eq!((&line["completed"], &line["interrupted"], &line["total"]), (&json!(3), &json!(1), &json!(4)));
    }
    records.idem(&["stats"]).ends(0).says("pay\n    1 interrupted, 3 completed\n");
}

#[tokio::test]
async fn all_keys_with_a_prefix_are_listed_and_then_forgotten() {
    let records = Records::new().await;
    for name in ["acme:1", "acme:2", "acmeist:1"] {
        completed(&records.store, name, b"1").await;
    }
    pending(&records.store, "acme:3").await;
    let forget = ["forget", "--prefix", "pay/acme:"];
    let dry = records.idem(&[&forget[..], &["--dry-run", "--json"]].concat()).ends(0);
    assert_eq!(keys(&dry), ["pay/acme:1", "pay/acme:2", "pay/acme:3"]);
    assert!(dry.lines().iter().all(|line| line["action"] == "would_forget"));
    records
        .idem(&forget)
        .ends(2)
        .complains("begin with `pay/acme:`, and give up the results of 2: nobody can be asked");
    assert_eq!(state(&records.store, "acme:1").await, Some("completed"));
    let done = records.idem(&[&forget[..], &["--yes"]].concat()).ends(1);
    done.says("forgotten    pay/acme:1, attempt 1").says("left         pay/acme:3").complains("1 of 3 records");
    for (name, left) in
        [("acme:1", None), ("acme:2", None), ("acme:3", Some("pending")), ("acmeist:1", Some("completed"))]
    {
        assert_eq!(state(&records.store, name).await, left, "{name}");
    }
    records.idem(&["forget", "--prefix", "ship/", "--yes"]).ends(4);
    records.idem(&["forget", "--prefix", "pay", "--yes"]).ends(2).complains("is no prefix");
    records.idem(&["forget", "--yes"]).ends(2);
}

#[tokio::test]
async fn watch_lists_records_that_need_an_operator_first() {
    let records = Records::new().await;
    pending(&records.store, "a").await;
    interrupted(&records.store, "b").await;
    completed(&records.store, "c", b"1").await;
    let looks = records.idem(&["watch", "--times", "2", "--every", "1s", "--counts", "--json"]).ends(0).lines();
    assert_eq!(looks.len(), 2);
    for look in &looks {
        let names: Vec<_> = look["records"].as_array().unwrap().iter().map(|it| it["key"].clone()).collect();
        assert_eq!(names, ["pay/b", "pay/a"]);
        assert_eq!((&look["running"], &look["interrupted"], &look["all"]["total"]), (&json!(1), &json!(1), &json!(3)));
    }
    assert_eq!((&looks[0]["ended_per_second"], &looks[1]["ended_per_second"]), (&json!(null), &json!(0.0)));
    records.idem(&["watch", "--times", "1"]).ends(0).says("1 running, 0 lapsed, 1 interrupted\ninterrupted");
    // On a terminal, `watch` shows a screen, which `q` ends.
    let line = format!("stty cols 40 rows 20; {} watch --store {}", env!("CARGO_BIN_EXE_idem"), records.url());
    let (status, said) = on_terminal(&line, "q");
    assert_eq!(status, 0, "{said}");
    assert!(said.contains("pay/b") && said.contains("interrupted"), "{said}");
}

#[tokio::test]
async fn docs_cli_names_every_verb_json_field_and_doctor_check() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/cli.md")).unwrap();
    let help = run(&mut command(["--help"])).ends(0).out;
    let verbs = help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let verbs: Vec<_> =
        verbs.filter_map(|line| line.split_whitespace().next()).filter(|verb| *verb != "help").collect();
    assert!(verbs.len() > 12, "{help}");
    let missing: Vec<_> = verbs.iter().filter(|verb| !document.contains(&format!("idem {verb}"))).collect();
    assert!(missing.is_empty(), "docs/cli.md does not name {missing:?}");
    let records = Records::new().await;
    pending(&records.store, "a").await;
    completed(&records.store, "b", b"1").await;
    let listed = [
        &["show", "pay/a"][..],
        &["show", "pay/b", "--result"],
        &["watch", "--times", "1"],
        &["list", "--limit", "1"],
        &["stats"],
    ];
    for verb in listed {
        for line in records.idem(&[verb, &["--json"]].concat()).ends(0).lines() {
            let fields = line.as_object().unwrap().keys();
            // The fields of a count are the names of standings.
            let missing: Vec<_> =
                fields.filter(|field| !document.contains(&format!("`{field}`")) && *field != "next").collect();
            assert!(missing.is_empty(), "docs/cli.md does not name {missing:?} of {verb:?}");
        }
    }
    for finding in records.idem(&["doctor", "--json"]).lines() {
        let check = finding["check"].as_str().unwrap();
        assert!(document.contains(&format!("`{check}`")), "docs/cli.md does not name the check `{check}`");
    }
}

#[tokio::test]
async fn a_handler_replays_the_result_that_an_operator_recorded() {
    use idem_runtime::{Compressed, Error, Store, StoreExt, idempotent};
    use tokio::sync::Semaphore;

    #[idempotent(key = "{order}", ttl = "1h", store = store, scope = "charge", on_crash = fail)]
    async fn charge(store: &dyn Store, order: u32, began: &Semaphore) -> Result<Vec<String>, Error> {
        began.add_permits(1);
        std::future::pending().await
    }
    let began = Semaphore::new(0);
    let records = Records::new().await;
    let compressed = Compressed::new(records.store.clone());
    let stores: [&dyn Store; 2] = [&records.store, &compressed];
    for (order, store) in (1..).zip(stores) {
        tokio::select! {
            ended = charge(store, order, &began) => panic!("{ended:?}"),
            permit = began.acquire() => permit.unwrap().forget(),
        }
        store.flush().await;
        let error = charge(store, order, &began).await.unwrap_err();
        // The operator copies the key from a log, where it stands between quotes.
        let text = error.to_string();
        let shown = text.split('`').nth(1).unwrap();
        let file = records.file(b"[\"receipt\", \"7\"]");
        records.decides(&["resolve", "--completed", file.to_str().unwrap()], shown).ends(0);
        assert_eq!(charge(store, order, &began).await.unwrap(), ["receipt", "7"]);
        records.decides(&["discard"], shown).ends(0);
        records.decides(&["resolve", "--without-result"], shown).ends(0);
        let unknown = charge(store, order, &began).await.unwrap_err();
        assert!(matches!(unknown, Error::ResultUnavailable { .. }), "{unknown}");
    }
}
