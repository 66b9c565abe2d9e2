//! Tests of arguments, printed commands and exit statuses, with SQLite files.

use std::io::{BufReader, Read as _, Write as _};
use std::process::{Command, Stdio};

use idem_runtime::Store;
use idem_runtime::store::{Release, Reservation, ReserveRequest};
use idem_tests::sqlite::raw;
use serde_json::json;

use super::support::{Records, Run, command, completed, idem_at, interrupted, key, pending, run, state};

/// Values of keys that a shell would change, if they were not quoted.
const AWKWARD: [&str; 8] = ["a b", "it's", "$HOME", "`id`", "a\nb", "\"x\" \\ !", "*;&|<>()", "ü=~#"];

/// Runs a line in a shell. The shell finds `idem`. In place of the clients of stores, the shell finds a program that
/// prints its arguments, each with a NUL at its end.
fn pasted(records: &Records, line: &str) -> Run {
    let programs = records.folder.path().join("programs");
    std::fs::create_dir_all(&programs).unwrap();
    for name in ["sqlite3", "psql", "redis-cli", "aws", "nats"] {
        use std::os::unix::fs::PermissionsExt as _;
        let file = programs.join(name);
        std::fs::write(&file, "#!/bin/sh\nprintf '%s\\0' \"$@\"\n").unwrap();
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let idem = std::path::Path::new(env!("CARGO_BIN_EXE_idem")).parent().unwrap();
    let path = format!("{}:{}:{}", programs.display(), idem.display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-c", line]).env("PATH", path).env("IDEM_STORE", records.url()).env_remove("IDEM_NAMESPACE");
    run(shell.stdin(Stdio::null()))
}

/// Returns the words of the line that `idem key` prints for the client of the store at `url`, as a shell reads them.
fn client_words(records: &Records, url: &str, arguments: &[&str]) -> Vec<String> {
    let printed = idem_at(url, &[&["key"], arguments].concat()).ends(0).out;
    let line = printed.split_once("\nstored ").unwrap().1.split_once('\n').unwrap().1;
    let line = line.split_once(' ').unwrap().1;
    let read = pasted(records, line).ends(0);
    read.out.split_terminator('\0').map(str::to_owned).collect()
}

#[tokio::test]
async fn printed_commands_find_the_record_of_an_awkward_key_when_pasted() {
    let records = Records::new().await;
    for value in AWKWARD {
        let of = idem_runtime::Key::new("pay", value).unwrap();
        let hour = std::time::Duration::from_secs(3600);
        let request = ReserveRequest::new(of.clone(), records.store.context().new_owner(), hour, hour);
        let Reservation::Granted { lease, .. } = records.store.reserve(&request).await.unwrap() else {
            panic!("{value}")
        };
        let _ = records.store.release(&lease, Release::Interrupted).await.unwrap();

        let printed = records.idem(&["key", "--scope", "pay", value]).ends(0).out;
        let line = |name: &str| {
            let line = printed.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{printed}"));
            line.trim_start().to_owned()
        };
        for shown in [line("key "), line("stored ")] {
            let shown = pasted(&records, &format!("idem show {shown} --json")).ends(0).json();
            assert_eq!(shown["stored"], of.as_str(), "{value:?}");
        }
        // The client of the store gets a statement that selects this record.
        let words = client_words(&records, &records.url(), &["--scope", "pay", value]);
        assert_eq!(words[..2], ["-readonly", records.folder.file().to_str().unwrap()]);
        let found: String = raw(&records.folder.file())
            .query_row(&words[2].replacen('*', "key", 1), [], |row| row.get(0))
            .unwrap_or_else(|error| panic!("{error}: {words:?}"));
        assert_eq!(found, of.as_str());
        // `idem key` does not connect to a store, so the other stores need no server here.
        let words = client_words(&records, "redis://u:pw@h:7/3", &["--scope", "pay", value]);
        let stored = format!("idem:{}", of.as_str());
        assert_eq!(words, ["-h", "h", "-p", "7", "--user", "u", "-n", "3", "PTTL", &stored]);
        let words = client_words(&records, "postgres://u:pw@h:7/d?schema=it's", &["--scope", "pay", value]);
        assert_eq!(words[..9], ["-h", "h", "-p", "7", "-U", "u", "-d", "d", "-x"]);
        assert!(words[10].starts_with("SELECT * FROM \"it's\".records WHERE key = '"), "{words:?}");
        let url = "nats://bob:secret@h:9/orders";
        let words = client_words(&records, url, &["--scope", "pay", value]);
        let subject = idem_tests::nats::subject_of("orders", &of);
        assert_eq!(words, ["--server", "h:9", "stream", "get", "KV_orders", "--last-for", &subject]);
        let url = "dynamodb://records?region=r&endpoint=http://h:8";
        let words = client_words(&records, url, &["--scope", "pay", value]);
        let place =
            ["dynamodb", "get-item", "--region", "r", "--table-name", "records", "--endpoint-url", "http://h:8"];
        assert_eq!(words[..8], place);
        let item: serde_json::Value = serde_json::from_str(&words[9]).unwrap();
        assert_eq!(item, json!({ "key": { "S": of.as_str() } }));
    }
    // The command for the next page of a list can be pasted, too.
    let next = records.idem(&["list", "--limit", "1"]).ends(0).err;
    let after = next.trim().strip_prefix("There may be more: ").unwrap_or_else(|| panic!("{next}"));
    let rest = pasted(&records, &format!("idem list --json {after}")).ends(0);
    assert_eq!(rest.lines().len(), AWKWARD.len() - 1, "{rest:?}");
    // A refusal without `--seen` prints the command that shows the revision.
    let shown = idem_runtime::Key::new("pay", "it's").unwrap().to_string();
    let refused = records.idem(&["reopen", &shown, "--yes"]).ends(2).err;
    let show = refused.split('`').find(|text| text.starts_with("idem show ")).unwrap_or_else(|| panic!("{refused}"));
    pasted(&records, show).ends(0).says("interrupted");
}

#[tokio::test]
async fn the_store_may_be_named_before_the_command() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let url = records.url();
    for line in [
        &["--store", &url, "show", "pay/42"][..],
        &["show", "pay/42", "--store", &url],
        &["--timeout", "5s", "--store", &url, "list"],
        &["--store", &url, "schema", "diff"],
        &["schema", "--store", &url, "diff"],
    ] {
        run(&mut command(line)).ends(0);
    }
    // An argument after the command overrides the same argument before the command, and both override the variable.
    run(&mut command(["--store", "sqlite:/nowhere", "show", "pay/42", "--store", &url])).ends(0);
    run(command(["--store", &url, "show", "pay/42"]).env("IDEM_STORE", "sqlite:/nowhere")).ends(0);
    run(&mut command(["--timeout", "0s", "show", "pay/42", "--store", &url])).ends(2).complains("a time limit");
    run(&mut command(["show", "pay/42"])).ends(2).complains("which store?");
}

#[test]
fn the_forms_of_urls_are_printed_whole() {
    let whole = "redis://[user:password@]host[:port][/database]";
    run(&mut command(["show", "pay/42"])).ends(2).complains(whole).complains("postgres://[user[:password]@]host");
    idem_at("redis://bob:secret@host:port/0", &["show", "pay/42"]).ends(2).complains(whole);
    idem_at("postgres://bob:secret@host:port/d", &["show", "x/y"])
        .ends(2)
        .complains("postgres://[user[:password]@]host");
    // The help is printed unchanged, to standard output and to standard error.
    let help = run(&mut command(["--help"])).ends(0).out;
    assert_eq!(run(&mut command([""; 0])).ends(2).err, help);
    assert!(!help.contains("***"), "{help}");
}

#[tokio::test]
async fn errors_of_wrong_use_are_json_under_the_option_json() {
    let records = Records::new().await;
    for line in [
        &["show", "--json"][..],
        &["--json"],
        &["list", "--stat", "running", "--json"],
        &["list", "--json", "--older-than", "soon"],
        &["resolve", "pay/42", "--json"],
        &["nonsense", "--json"],
        &["show", "pay/42", "redis://bob:secret@host", "--json"],
        &["reopen", "order42", "--json"],
        &["conformance", "http", "nonsense", "--json"],
    ] {
        let refused = records.idem(line).ends(2);
        let error = refused.error();
        assert_eq!((&error["error"], &error["status"]), (&json!("usage"), &json!(2)), "{line:?}");
        assert!(error["message"].as_str().is_some_and(|it| !it.is_empty() && !it.starts_with("error")), "{error}");
        assert!(refused.out.is_empty() && !refused.err.contains("secret"), "{refused:?}");
    }
    // Behind `--`, `--json` is the argument of a command, and not an option.
    let plain = records.idem(&["show", "x/y", "--", "--json"]).ends(2);
    assert!(plain.err.starts_with("error: "), "{plain:?}");
}

#[tokio::test]
async fn lists_select_by_a_part_of_the_key_and_by_attempts() {
    let records = Records::new().await;
    for name in ["acme:1", "acme:2", "bolt:1"] {
        interrupted(&records.store, name).await;
    }
    let keys = |run: Run| -> Vec<_> { run.lines().iter().map(|it| it["key"].as_str().unwrap().to_owned()).collect() };
    let list = |more: &[&str]| records.idem(&[&["list", "--json"], more].concat());
    assert_eq!(keys(list(&["--contains", "acme"]).ends(0)), ["pay/acme:1", "pay/acme:2"]);
    assert_eq!(keys(list(&["--contains", "y/bolt:"]).ends(0)), ["pay/bolt:1"]);
    list(&["--contains", "ACME"]).ends(4);
    records.idem(&["stats", "--contains", ":1"]).ends(0).says("all\n    2 interrupted");
    // Two attempts return an error, and only an operator lets a third attempt run under `max_attempts = 2`.
    for attempt in 1..=2 {
        let lease = pending(&records.store, "poison").await;
        assert_eq!(lease.attempt, attempt);
        let _ = records.store.release(&lease, Release::Returned).await.unwrap();
    }
    assert_eq!(keys(list(&["--attempts-exhausted", "2"]).ends(0)), ["pay/poison"]);
    list(&["--attempts-exhausted", "3"]).ends(4);
    list(&["--attempts-exhausted", "0"]).ends(2);
    records
        .idem(&["show", "pay/poison"])
        .ends(0)
        .says("unless `max_attempts` of its handler is 2 or less: then it ends");
    records.decides(&["reopen"], "pay/poison").ends(0);
    list(&["--attempts-exhausted", "1"]).ends(4);
    records.idem(&["show", "pay/poison"]).ends(0).says("what now     the next delivery runs\n");
}

#[tokio::test]
async fn a_reason_is_shown_although_no_user_is_known() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let seen = records.revision("pay/42");
    let mut reopen = command(["reopen", "pay/42", "--seen", &seen, "--reason", "INC-7", "--yes"]);
    for name in ["USER", "LOGNAME", "USERNAME"] {
        reopen.env_remove(name);
    }
    run(reopen.env("IDEM_STORE", records.url())).ends(0);
    records.idem(&["show", "pay/42"]).ends(0).says("decided by   unknown: INC-7\n");
    let shown = records.idem(&["show", "pay/42", "--json"]).ends(0).json();
    assert_eq!((&shown["decided_by"], &shown["decided_reason"]), (&json!(null), &json!("INC-7")));
}

#[tokio::test]
async fn a_namespace_is_refused_where_records_have_none() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    for url in [records.url(), "postgres://h/d".to_owned()] {
        for verb in [&["show", "pay/42"][..], &["list"], &["key", "pay/42"], &["doctor"], &["purge", "--yes"]] {
            let refused = idem_at(&url, &[verb, &["--namespace", "shop:"]].concat()).ends(2);
            refused.complains("have no namespace").complains("leave both out");
        }
        run(command(["show", "pay/42"]).env("IDEM_STORE", &url).env("IDEM_NAMESPACE", "shop:"))
            .ends(2)
            .complains("have no namespace");
    }
}

#[tokio::test]
async fn purge_accepts_the_option_yes() {
    let records = Records::new().await;
    records.idem(&["purge", "--yes"]).ends(0).says("0 expired records removed from sqlite");
}

#[tokio::test]
async fn migrate_fails_on_sqlite_if_the_index_or_a_column_is_missing_afterwards() {
    let records = Records::new().await;
    let migrate = || records.idem(&["schema", "migrate", "--yes"]);
    migrate().ends(0);
    let file = raw(&records.folder.file());
    file.execute_batch("DROP INDEX idem_records_listed").unwrap();
    migrate().ends(1).complains("there is no index on `listed_at`").complains("`idem schema print sqlite`");
    records.idem(&["schema", "diff"]).ends(1).says("there is no index on `listed_at`");
    file.execute_batch("DROP INDEX idem_records_undecided").unwrap();
    records.idem(&["schema", "diff"]).ends(1).says("there is no index on `key` where `on_crash_fail`");
    // The printed definition creates the missing indexes.
    file.execute_batch(&records.idem(&["schema", "print", "sqlite"]).ends(0).out).unwrap();
    migrate().ends(0);
    file.execute_batch("ALTER TABLE idem_records DROP COLUMN decided_reason").unwrap();
    migrate().ends(3).complains("it is left alone");
}

#[tokio::test]
async fn of_two_people_who_look_at_a_record_only_the_first_decides() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    // Bob sees the question, and hesitates.
    let line = format!("{} reopen pay/42 --by bob --store {}", env!("CARGO_BIN_EXE_idem"), records.url());
    let mut bob = Command::new("script");
    bob.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut bob = bob.spawn().expect("`script` of util-linux");
    let (mut said, mut byte) = (String::new(), [0]);
    let mut screen = BufReader::new(bob.stdout.take().unwrap());
    while !said.ends_with("[y/N] ") {
        screen.read_exact(&mut byte).unwrap_or_else(|error| panic!("{error}: {said}"));
        said.push(char::from(byte[0]));
    }
    // Meanwhile Alice decides about the record that both have seen.
    records.decides(&["resolve", "--without-result", "--reason", "INC-7"], "pay/42").ends(0);
    bob.stdin.take().unwrap().write_all(b"y\n").unwrap();
    screen.read_to_string(&mut said).unwrap();
    assert_eq!(bob.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("alice has decided about it, and it is completed; nothing was changed"), "{said}");
    assert!(said.contains("look at the record again (`idem show`)"), "{said}");
    assert_eq!(state(&records.store, "42").await, Some("completed"));
}

#[tokio::test]
async fn of_two_simultaneous_decisions_about_a_record_one_is_refused() {
    let records = Records::new().await;
    for round in 0..5 {
        let name = round.to_string();
        interrupted(&records.store, &name).await;
        let shown = format!("pay/{name}");
        let seen = records.revision(&shown);
        let decide = |verb: &[&str], by: &str| {
            let mut decide = command([verb, &[&shown, "--seen", &seen, "--yes", "--by", by]].concat());
            decide.env("IDEM_STORE", records.url()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let both = [decide(&["reopen"], "alice"), decide(&["resolve", "--without-result"], "bob")];
        let both = both.map(|child| child.wait_with_output().unwrap());
        let mut statuses = both.each_ref().map(|it| it.status.code());
        let refused = both.iter().find(|it| it.status.code() == Some(1)).unwrap_or_else(|| panic!("{both:?}"));
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(said.contains("has decided about it") && said.contains("nothing was changed"), "{said}");
        statuses.sort_unstable();
        assert_eq!(statuses, [Some(0), Some(1)]);
    }
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "one table of all commands")]
async fn each_command_ends_with_the_documented_status() {
    let records = Records::new().await;
    completed(&records.store, "done", b"1").await;
    interrupted(&records.store, "stuck").await;
    let file = records.file(b"1");
    let file = file.to_str().unwrap();
    let seen = records.revision("pay/stuck");
    let other = seen.replacen('1', "2", 1);
    let done = records.revision("pay/done");
    let running = pending(&records.store, "runs").await;
    let runs = records.revision("pay/runs");
    let cases: &[(i32, &[&[&str]])] = &[
        // Wrong use.
        (
            2,
            &[
                &[],
                &["nonsense"],
                &["show"],
                &["show", "order42"],
                &["list", "--state", "stuck"],
                &["stats", "--older-than", "soon"],
                &["watch", "--times", "x"],
                &["resolve", "pay/stuck"],
                &["resolve", "pay/stuck", "--completed", "/nowhere", "--yes"],
                &["reopen", "pay/stuck"],
                &["reopen", "pay/stuck", "--yes"],
                &["discard", "pay/done", "--yes"],
                &["forget", "pay/stuck"],
                &["forget", "--prefix", "pay", "--yes"],
                &["release", "pay/runs"],
                &["purge", "--batch", "0"],
                &["key"],
                &["key", "order42"],
                &["schema"],
                &["schema", "migrate"],
                &["schema", "print", "redis"],
                &["conformance", "store"],
                &["conformance", "http"],
                &["completions", "cmd"],
                &["doctor", "--namespace", "x"],
            ],
        ),
        // Nothing found.
        (
            4,
            &[
                &["show", "pay/none"],
                &["list", "--scope", "none"],
                &["resolve", "pay/none", "--without-result", "--yes", "--seen", &seen],
                &["resolve", "pay/none", "--shape"],
                &["reopen", "pay/none", "--yes", "--seen", &seen],
                &["discard", "pay/none", "--yes", "--seen", &seen],
                &["forget", "pay/none", "--yes", "--seen", &seen],
                &["forget", "--prefix", "none/", "--yes"],
                &["release", "--break-lease", "pay/none", "--yes", "--seen", &seen],
            ],
        ),
        // Refused.
        (
            1,
            &[
                &["resolve", "pay/runs", "--completed", file, "--yes", "--seen", &runs],
                &["resolve", "pay/done", "--without-result", "--yes", "--seen", &done],
                &["resolve", "pay/stuck", "--completed", file, "--yes", "--seen", &other],
                &["reopen", "pay/done", "--yes", "--seen", &done],
                &["discard", "pay/stuck", "--yes", "--seen", &seen],
                &["forget", "pay/runs", "--yes", "--seen", &runs],
                &["forget", "--prefix", "pay/runs", "--yes"],
                &["release", "--break-lease", "pay/done", "--yes", "--seen", &done],
            ],
        ),
        // Done.
        (
            0,
            &[
                &["--help"],
                &["--version"],
                &["doctor"],
                &["show", "pay/stuck"],
                &["list"],
                &["stats"],
                &["stats", "--scope", "none"],
                &["watch", "--times", "1"],
                &["resolve", "pay/stuck", "--shape"],
                &["resolve", "pay/stuck", "--completed", file, "--yes", "--seen", &seen],
                &["resolve", "pay/done", "--replace", "--without-result", "--yes", "--seen", &done],
                &["release", "--break-lease", "pay/runs", "--yes", "--seen", &runs],
                &["forget", "--prefix", "pay/", "--dry-run"],
                &["forget", "--prefix", "pay/", "--yes"],
                &["purge"],
                &["key", "pay/42"],
                &["schema", "print", "sqlite"],
                &["schema", "diff"],
                &["schema", "migrate", "--yes"],
                &["completions", "bash"],
                &["man"],
                &["conformance", "http", "--print-cases"],
            ],
        ),
    ];
    for (status, lines) in cases {
        for line in *lines {
            records.idem(line).ends(*status);
        }
    }
    drop(running);
    // Without a store, each command ends with the status 3.
    let key = key("42").to_string();
    for line in [
        &["doctor"][..],
        &["show", &key],
        &["list"],
        &["stats"],
        &["watch", "--times", "1"],
        &["resolve", &key, "--without-result", "--yes", "--seen", &seen],
        &["resolve", &key, "--shape"],
        &["reopen", &key, "--yes", "--seen", &seen],
        &["discard", &key, "--yes", "--seen", &seen],
        &["forget", &key, "--yes", "--seen", &seen],
        &["forget", "--prefix", "pay/", "--yes"],
        &["release", "--break-lease", &key, "--yes", "--seen", &seen],
        &["purge"],
        &["schema", "diff"],
        &["conformance", "store", "--yes"],
    ] {
        idem_at("sqlite:/nowhere/idem.db", line).ends(3);
        let line = [line, &["--timeout", "2s"]].concat();
        idem_at("postgres://bob:secret@127.0.0.1:1/db", &line).ends(3);
    }
    idem_at("postgres://127.0.0.1:1/db", &["schema", "migrate", "--yes", "--timeout", "2s"]).ends(3);
}
