//! The checker of HTTP servers, as a program: correct servers pass, each mistake is caught, and every case of the
//! checker catches at least one mistake.

use std::collections::{BTreeSet, HashSet};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Output, Stdio};
use std::slice;
use std::sync::Arc;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

#[path = "conformance/server.rs"]
mod server;

use server::{Mistake, serve, serve_and_close};

const CASES: &str = include_str!("../cases/http.json");
const PROFILES: [&str; 4] = ["ietf", "stripe", "acp", "ucp"];

/// A mistake, the profile of the server that makes this mistake, and the cases that catch the mistake.
type Catch = (Mistake, &'static str, &'static [&'static str]);

/// Mistakes that break a few rules. The listed cases are all cases that catch the mistake.
#[rustfmt::skip]
const CAUGHT: &[Catch] = &[
    (Mistake::CaseIgnored, "ietf", &["keys_differ_in_case"]),
    (Mistake::KeysCutShort, "stripe", &["longest_keys_are_distinct"]),
    (Mistake::LongAccepted, "acp", &["too_long_key_is_refused"]),
    (Mistake::ShortAccepted, "ucp", &["short_key_is_refused"]),
    (Mistake::EmptyAccepted, "ietf", &["empty_key_is_refused"]),
    (Mistake::QuotedEmptyAccepted, "ucp", &["empty_key_is_refused"]),
    (Mistake::KeyNotRequired, "acp", &["missing_key_is_refused", "missing_key_has_its_code"]),
    (Mistake::BareRefusals, "acp", &["missing_key_has_its_code", "refusal_is_an_idempotency_conflict", "running_request_tells_when_to_retry"]),
    (Mistake::KeyRequired, "stripe", &["requests_without_a_key_are_no_duplicates"]),
    (Mistake::NoKeyIsAKey, "stripe", &["requests_without_a_key_are_no_duplicates"]),
    (Mistake::NoKeyIsAKey, "ietf", &["requests_without_a_key_are_no_duplicates"]),
    (Mistake::EscapesRefused, "ietf", &["quoted_key_works"]),
    (Mistake::QuotesKept, "ietf", &["quotes_are_no_part_of_the_key", "parameters_are_no_part_of_the_key", "empty_key_is_refused"]),
    (Mistake::ParametersKept, "ietf", &["parameters_are_no_part_of_the_key"]),
    (Mistake::MalformedAccepted, "ietf", &["malformed_key_is_refused", "two_keys_are_refused"]),
    (Mistake::FirstLineCounts, "ietf", &["two_keys_are_refused"]),
    (Mistake::FirstOfListCounts, "ietf", &["two_keys_are_refused"]),
    (Mistake::PayloadIgnored, "stripe", &["another_payload_is_refused", "another_payload_is_refused_while_the_first_runs", "another_query_is_never_replayed", "another_route_is_never_replayed", "refusal_is_an_idempotency_error"]),
    (Mistake::PayloadIgnored, "acp", &["another_payload_is_refused", "another_payload_is_refused_while_the_first_runs", "key_is_repeated", "other_json_is_another_request", "refusal_is_an_idempotency_conflict"]),
    (Mistake::PayloadOverwrites, "ietf", &["another_payload_is_refused", "another_query_is_never_replayed"]),
    (Mistake::PayloadComparedLate, "ietf", &["another_payload_is_refused_while_the_first_runs"]),
    (Mistake::RouteIgnored, "ietf", &["another_route_is_never_replayed"]),
    (Mistake::RouteIgnored, "acp", &["another_route_is_never_replayed"]),
    (Mistake::BytesCompared, "acp", &["equal_json_is_the_same_request"]),
    (Mistake::NumbersAsWritten, "acp", &["equal_json_is_the_same_request"]),
    (Mistake::JsonCompared, "ucp", &["other_bytes_are_another_request"]),
    (Mistake::NullIsAbsent, "acp", &["other_json_is_another_request"]),
    (Mistake::ArraysAreSets, "acp", &["other_json_is_another_request"]),
    (Mistake::RunningIsFree, "ietf", &["duplicate_of_a_running_request_runs_nothing", "duplicate_of_a_running_request_is_409", "another_payload_never_runs", "another_payload_is_refused_while_the_first_runs", "running_request_is_described", "concurrent_duplicates_run_once", "hang_up_while_it_runs"]),
    (Mistake::RunningIsAwaited, "ucp", &["duplicate_of_a_running_request_is_409"]),
    (Mistake::NoRetryAfter, "acp", &["running_request_tells_when_to_retry"]),
    (Mistake::RunningHasAnotherCode, "acp", &["running_request_tells_when_to_retry"]),
    (Mistake::MissingKeyHasAnotherCode, "acp", &["missing_key_has_its_code"]),
    (Mistake::MissingKeyHasNoLink, "ietf", &["missing_key_is_explained"]),
    (Mistake::PayloadHasNoLink, "ietf", &["reuse_is_explained"]),
    (Mistake::RunningHasNoBody, "ietf", &["running_request_is_described"]),
    (Mistake::OtherPayloadRuns, "ietf", &["another_payload_never_runs", "another_payload_is_refused_while_the_first_runs"]),
    (Mistake::OtherPayloadRuns, "ucp", &["another_payload_never_runs"]),
    (Mistake::MethodIgnored, "ietf", &["another_method_is_never_replayed"]),
    (Mistake::MethodIgnored, "stripe", &["another_method_is_never_replayed"]),
    (Mistake::MethodIgnored, "acp", &["another_method_is_never_replayed"]),
    (Mistake::MethodIgnored, "ucp", &["another_method_is_never_replayed"]),
    (Mistake::QueryIgnored, "ietf", &["another_query_is_never_replayed"]),
    (Mistake::QueryIgnored, "stripe", &["another_query_is_never_replayed"]),
    (Mistake::LanguageCompared, "acp", &["headers_are_no_part_of_the_request"]),
    (Mistake::PutUnprotected, "ucp", &["put_is_protected"]),
    (Mistake::KeyNotRepeatedInRefusals, "acp", &["key_is_repeated"]),
    (Mistake::OnlyUuids, "ietf", &["keys_differ_in_case", "quoted_key_works"]),
    (Mistake::RunningIsAwaited, "acp", &["duplicate_of_a_running_request_is_409", "key_is_repeated", "running_request_tells_when_to_retry"]),
    (Mistake::CallerIgnored, "acp", &["callers_have_their_own_keys"]),
    (Mistake::CaseIgnored, "acp", &["keys_differ_in_case"]),
    (Mistake::HeadersLost, "acp", &["replay_keeps_headers"]),
    (Mistake::NoKeyIsAKey, "ucp", &["requests_without_a_key_are_no_duplicates", "missing_key_is_refused"]),
    (Mistake::NobodyIsSomebody, "acp", &["nobody_is_refused"]),
    (Mistake::TokenIsTheCaller, "ucp", &["new_token_is_the_same_caller"]),
    (Mistake::ReadThenWrite, "ietf", &["concurrent_duplicates_run_once"]),
    (Mistake::ReservesBeforeBody, "ietf", &["hang_up_in_the_body", "another_payload_is_refused_while_the_first_runs"]),
    (Mistake::CancelledWithClient, "ietf", &["hang_up_while_it_runs"]),
    (Mistake::RecordsTheDelivered, "ietf", &["hang_up_in_the_response", "hang_up_while_it_runs"]),
    (Mistake::LargeForgotten, "ietf", &["hang_up_in_the_response", "large_response_is_no_reason_to_run_again"]),
    (Mistake::CallerIgnored, "ietf", &["callers_have_their_own_keys"]),
    (Mistake::TokenIsTheCaller, "ietf", &["new_token_is_the_same_caller"]),
    (Mistake::NobodyIsSomebody, "ietf", &["nobody_is_refused"]),
    (Mistake::RefusalIsRecorded, "ietf", &["nobody_is_refused"]),
    (Mistake::NobodyGetsReplays, "ietf", &["nobody_is_refused"]),
    (Mistake::ErrorsForgotten, "ietf", &["declined_is_replayed"]),
    (Mistake::ErrorsForgotten, "stripe", &["declined_is_replayed", "server_error_is_replayed"]),
    (Mistake::ServerErrorForgotten, "stripe", &["server_error_is_replayed"]),
    (Mistake::ServerErrorRecorded, "acp", &["server_error_is_tried_again"]),
    (Mistake::KeyNotRepeated, "acp", &["key_is_repeated"]),
    (Mistake::NotMarked, "stripe", &["replay_is_marked"]),
    (Mistake::AllMarked, "acp", &["replay_is_marked"]),
    (Mistake::HeadersLost, "ietf", &["replay_keeps_headers"]),
    (Mistake::HeadersCollapsed, "ietf", &["replay_keeps_headers"]),
    (Mistake::CookieReplayed, "ietf", &["replay_sets_no_cookie"]),
    (Mistake::BareRefusals, "ietf", &["missing_key_is_explained", "reuse_is_explained", "running_request_is_described"]),
    (Mistake::BareRefusals, "stripe", &["refusal_is_an_idempotency_error"]),
    (Mistake::BareRefusals, "ucp", &["refusal_has_code_and_content"]),
];

/// Mistakes that break almost every replay. Cases that are not listed may catch these mistakes as well.
const CAUGHT_BY_MANY: &[Catch] = &[
    (
        Mistake::RunsAgain,
        "ietf",
        &["duplicate_is_replayed", "duplicate_of_a_running_request_runs_nothing", "hang_up_while_it_runs"],
    ),
    (Mistake::RecordsLate, "ietf", &["duplicate_is_replayed"]),
    (Mistake::StatusLost, "ietf", &["duplicate_is_replayed"]),
    (Mistake::BodyLost, "ucp", &["duplicate_is_replayed"]),
    (Mistake::KeyFromPayload, "ietf", &["another_key_is_another_operation"]),
    // A case may get a port again whose connection has ended, and the server then takes the two for one connection.
    (Mistake::LooksOncePerConnection, "ietf", &["pipelined_duplicates_run_once"]),
];

/// Freedoms that the IETF draft leaves to a server: keys are optional, a field that is no String (RFC 8941) is ignored,
/// there are no callers, the payload is only the body, and a replay has only a status and a body.
const FREEDOMS: &[Mistake] = &[
    Mistake::KeyNotRequired,
    Mistake::MalformedIgnored,
    Mistake::QuotedEmptyAccepted,
    Mistake::CaseIgnored,
    Mistake::LongAccepted,
    Mistake::PayloadComparedLate,
    Mistake::MethodIgnored,
    Mistake::QueryIgnored,
    Mistake::CallerIgnored,
    Mistake::NobodyIsSomebody,
    Mistake::HeadersLost,
    Mistake::CookieReplayed,
    Mistake::ServerErrorRecorded,
    Mistake::NotMarked,
    Mistake::NoRetryAfter,
];

fn idem<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_idem"));
    command.args(["conformance", "http"]).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    command
}

/// Runs the program. Returns its exit status, its output, and its errors.
async fn run<'a>(arguments: impl IntoIterator<Item = &'a str>) -> (i32, String, String) {
    let Output { status, stdout, stderr } = idem(arguments).output().await.unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code().unwrap(), text(stdout), text(stderr))
}

/// Verdict on a server: the exit status, and the names of the cases that the server fails.
#[derive(Debug, Default, PartialEq, Eq)]
struct Verdict {
    status: i32,
    failed: BTreeSet<String>,
    advice: BTreeSet<String>,
}

impl Verdict {
    /// Names of all cases whose rule the server breaks, whether the rule is required or advised.
    fn broken(&self) -> BTreeSet<String> {
        self.failed.union(&self.advice).cloned().collect()
    }
}

/// Checks a server that makes these mistakes.
async fn check(mistakes: &'static [Mistake], profile: &'static str) -> Verdict {
    check_at(serve(profile, mistakes).await, profile).await
}

/// Checks the server at `address`.
async fn check_at(address: SocketAddr, profile: &'static str) -> Verdict {
    let url = format!("http://{address}");
    let (status, output, errors) = run([&*url, "--profile", profile, "--json", "--timeout", "60s"]).await;
    assert_eq!(errors, "");
    let mut verdict = Verdict { status, ..Verdict::default() };
    for line in output.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        assert_eq!(line["profile"], profile);
        assert_eq!(line["passed"].as_bool(), Some(line["error"].is_null()), "{line}");
        let is_required = match line["level"].as_str() {
            Some("required") => true,
            Some("advised") => false,
            _ => panic!("{line}"),
        };
        for member in ["id", "source", "sentence"] {
            assert!(line[member].as_str().is_some_and(|text| !text.is_empty()), "{line}");
        }
        if line["passed"] == false {
            println!("{profile}: {}: {}", line["case"], line["error"]);
            let names = if is_required { &mut verdict.failed } else { &mut verdict.advice };
            names.insert(line["case"].as_str().unwrap().to_owned());
        }
    }
    // A server that gets only advice passes.
    assert_eq!(verdict.status, i32::from(!verdict.failed.is_empty()), "{verdict:?}");
    verdict
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_mistake_passes() {
    for profile in PROFILES {
        assert_eq!(check(&[], profile).await, Verdict::default(), "{profile}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_closes_each_connection_passes() {
    for profile in PROFILES {
        assert_eq!(check_at(serve_and_close(profile).await, profile).await, Verdict::default(), "{profile}");
    }
}

/// Returns the verdict on a server that only gets advice.
fn advice<const N: usize>(names: [&str; N]) -> Verdict {
    Verdict { advice: names.map(str::to_owned).into(), ..Verdict::default() }
}

/// The draft recommends 409. A duplicate that waits for the first response does not run the operation again either.
#[tokio::test(flavor = "multi_thread")]
async fn under_the_ietf_draft_a_server_may_let_a_duplicate_wait() {
    let verdict = check(&[Mistake::RunningIsAwaited], "ietf").await;
    assert_eq!(verdict, advice(["duplicate_of_a_running_request_is_409"]));
}

/// A server that does everything that the draft demands with MUST and SHOULD, and nothing more.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_uses_every_freedom_of_the_ietf_draft_passes() {
    let expected = advice([
        "keys_differ_in_case",
        "empty_key_is_refused",
        "quotes_are_no_part_of_the_key",
        "malformed_key_is_refused",
        "two_keys_are_refused",
        "another_payload_is_refused_while_the_first_runs",
        "another_method_is_never_replayed",
        "another_query_is_never_replayed",
        "callers_have_their_own_keys",
        "nobody_is_refused",
        "replay_keeps_headers",
        "replay_sets_no_cookie",
    ]);
    assert_eq!(check(FREEDOMS, "ietf").await, expected);
}

/// The draft recommends UUIDs as keys, and a fixed format of keys that the server checks.
#[tokio::test(flavor = "multi_thread")]
async fn under_the_ietf_draft_a_server_may_accept_only_uuids_as_keys() {
    let verdict = check(&[Mistake::OnlyUuids], "ietf").await;
    assert_eq!(verdict, advice(["keys_differ_in_case", "quoted_key_works"]));
}

/// Checks one server for each mistake. Returns the mistakes for which `is_right` rejects the set of failed cases.
async fn missed(catches: &'static [Catch], is_right: fn(&BTreeSet<String>, &BTreeSet<String>) -> bool) -> Vec<String> {
    // At most 16 checks run at the same time, because each check runs a server and a process.
    let room = Arc::new(Semaphore::new(16));
    let checks = catches.iter().map(|(mistake, profile, cases)| {
        let room = Arc::clone(&room);
        tokio::spawn(async move {
            let _place = room.acquire_owned().await.unwrap();
            (mistake, profile, cases, check(slice::from_ref(mistake), profile).await)
        })
    });
    let mut missed = Vec::new();
    for check in checks.collect::<Vec<_>>() {
        let (mistake, profile, cases, verdict) = check.await.unwrap();
        if !is_right(&verdict.broken(), &cases.iter().map(ToString::to_string).collect()) {
            missed.push(format!("{mistake:?} of {profile}: {:?}, not {cases:?}", verdict.broken()));
        }
    }
    missed
}

#[tokio::test(flavor = "multi_thread")]
async fn each_server_mistake_fails_exactly_the_listed_cases() {
    let missed = missed(CAUGHT, |broken, cases| broken == cases).await;
    assert!(missed.is_empty(), "{missed:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_mistake_in_all_replays_fails_at_least_the_listed_cases() {
    let missed = missed(CAUGHT_BY_MANY, BTreeSet::is_superset).await;
    assert!(missed.is_empty(), "{missed:#?}");
}

#[test]
fn each_built_in_case_catches_a_server_mistake() {
    let file: Value = serde_json::from_str(CASES).unwrap();
    let names: Vec<_> = file["cases"].as_array().unwrap().iter().map(|case| case["name"].as_str().unwrap()).collect();
    let catches = || CAUGHT.iter().chain(CAUGHT_BY_MANY);
    let catching: HashSet<_> = catches().flat_map(|(_, _, cases)| *cases).copied().collect();
    let idle: Vec<_> = names.iter().filter(|name| !catching.contains(*name)).collect();
    assert!(idle.is_empty(), "these cases are not proven to catch anything: {idle:?}");
    let made: HashSet<_> = catches().map(|(mistake, _, _)| mistake).chain(FREEDOMS).collect();
    let unused: Vec<_> = Mistake::ALL.iter().filter(|mistake| !made.contains(mistake)).collect();
    assert!(unused.is_empty(), "no case is named for these mistakes: {unused:?}");
}

#[tokio::test]
async fn the_report_names_each_case_and_the_rule_that_a_server_breaks() {
    let url = format!("http://{}/", serve("ietf", &[Mistake::CookieReplayed]).await);
    let (status, output, errors) =
        run([&*url, "--case", "replay_sets_no_cookie", "--case", "duplicate_is_replayed"]).await;
    assert_eq!((status, &*errors), (0, ""));
    let lines: Vec<_> = output.lines().collect();
    assert!(lines[0].starts_with("passed  IK-01  duplicate_is_replayed  "), "{output}");
    assert!(lines[1].starts_with("advice  IK-47  replay_sets_no_cookie  A replay has no Set-Cookie"), "{output}");
    assert!(lines[2].starts_with("        step 2: Set-Cookie is there"), "{output}");
    assert_eq!(
        lines[3],
        "        idem, a choice of this project: A cookie belongs to the session of the first request."
    );
    assert_eq!(lines.last(), Some(&"ietf: 1 of 2 cases passed, 0 failed, 1 with advice"));

    let url = format!("http://{}/", serve("ietf", &[Mistake::RunsAgain]).await);
    let (status, output, errors) = run([&*url, "--case", "IK-01"]).await;
    assert_eq!((status, &*errors), (1, ""));
    let lines: Vec<_> = output.lines().collect();
    assert!(lines[0].starts_with("FAILED  IK-01  duplicate_is_replayed  "), "{output}");
    assert!(
        lines[2].starts_with("        draft-ietf-httpapi-idempotency-key-header-07 §2.6: The resource SHOULD "),
        "{output}"
    );
    assert_eq!(lines.last(), Some(&"ietf: 0 of 1 cases passed, 1 failed, 0 with advice"));
}

#[tokio::test]
async fn print_cases_prints_the_built_in_file_of_cases() {
    let (status, output, errors) = run(["--print-cases"]).await;
    assert_eq!((status, &*output, &*errors), (0, CASES, ""));
}

#[tokio::test]
async fn arguments_replace_the_routes_and_callers_of_the_file_of_cases() {
    let url = format!("http://{}", serve("acp", &[]).await);
    let only = ["--profile", "acp", "--case", "callers_have_their_own_keys"];
    let ask = async |arguments: &[&'static str]| {
        let arguments = arguments.iter().copied().chain(only);
        run([&*url].into_iter().chain(arguments)).await.0
    };
    assert_eq!(ask(&["--path", "/transfers", "--other-path", "/loans", "--counter", "/count"]).await, 0);
    // The second caller now sends another token of the first caller.
    assert_eq!(ask(&["--caller", "second=Authorization: Bearer alice-2"]).await, 1);
    assert_eq!(ask(&["--counter", "/transfers"]).await, 2);
}

#[tokio::test]
async fn wrong_arguments_are_an_error() {
    let url = format!("http://{}", serve("ietf", &[]).await);
    for (arguments, text) in [
        (&["127.0.0.1:8080"][..], "not a URL to check"),
        (&["https://[::1"], "not a URL to check"),
        (&["ftp://example.com"], "`ftp` is not http"),
        (&["http://alice:secret@example.com"], "give credentials with --caller"),
        (&["http://example.com/?a=1"], "it has a query"),
        (&["http://"], "not a URL to check"),
        (&["http://example.com:99999"], "not a URL to check"),
        (&["http://example.com:0"], "it names no host and port"),
        (&[], "required arguments were not provided"),
        (&[&url, "--profile", "paypal"], "possible values: ietf, stripe, acp, ucp"),
        (&[&url, "--case", "no_such_case"], "the profile ietf has no case `no_such_case`"),
        (&[&url, "--case", "short_key_is_refused"], "the profile ietf has no case `short_key_is_refused`"),
        (&[&url, "--case", "IK-06"], "the profile ietf has no case `IK-06`"),
        (&[&url, "--print-cases"], "cannot be used with"),
        (&[&url, "--caller", "alice"], "--caller is written as"),
        (&[&url, "--caller", "alice=Authorization: x"], "there is no caller `alice`; there are first, nobody"),
        (&[&url, "--caller", "first=Bearer secret"], "written as `Name: value`"),
        (&[&url, "--path", "payments"], "`payments` is no path"),
        (&[&url, "--timeout", "0"], "from one second to one hour"),
        (&[&url, "--cases", "/no/such/file"], "/no/such/file: No such file"),
        (&[&url, "--cases", "/"], "/: Is a directory"),
        (&[&url, "--cases", "/dev/zero"], "/dev/zero: not a file of cases: it has 4194304 bytes or more"),
    ] {
        let (status, output, errors) = run(arguments.iter().copied()).await;
        assert_eq!((status, &*output), (2, ""), "{arguments:?}: {errors}");
        assert!(errors.contains(text), "{arguments:?}: {errors}");
        assert!(!errors.contains("secret"), "{errors}");
    }
}

#[tokio::test]
async fn a_malformed_file_of_cases_is_refused_with_the_mistake_named() {
    let file = std::env::temp_dir().join(format!("idem-cases-{}.json", std::process::id()));
    let own = |cases: &str| {
        let head = r#""path":"/p","other_path":"/o","counter":"/count","body":{},"sources":{"RFC":{}}"#;
        format!(r#"{{{head},"callers":{{"first":["A: b"]}},"cases":{cases}}}"#)
    };
    let ground =
        |profile: &str| format!(r#"{{"profiles":["{profile}"],"level":"required","source":"RFC 1","sentence":"s"}}"#);
    let one = |profile: &str, steps: &str| {
        let grounds = ground(profile);
        format!(r#"{{"id":"1","name":"a","rule":"","grounds":[{grounds}],"steps":{steps},"runs":1}}"#)
    };
    let case = |steps: &str| own(&format!("[{}]", one("ietf", steps)));
    let (ietf, acp) = (ground("ietf"), one("acp", "[{}]"));
    // Each entry has a text with one mistake, and a part of the expected error.
    for (text, error) in [
        (String::new(), "not a file of cases: EOF"),
        ("no json".to_owned(), "not a file of cases: expected"),
        ("[]".to_owned(), "not a file of cases: "),
        ("{}".to_owned(), "missing field `path`"),
        (own("[]"), "it has no cases"),
        (own("[{}]"), "missing field `id`"),
        (own(&format!("[{acp},{acp}]")), "case `a`: there are two of this name"),
        (own(&format!("[{acp},{}]", acp.replace(r#""a""#, r#""b""#))), "case `b`: there are two with the id `1`"),
        (case("[{}]").replace(r#""id":"1""#, r#""id":"1 2""#), "an id is made of letters, digits and -"),
        (case("[{}]").replace(r#""sentence":"s""#, r#""sentence":" ""#), "a ground has a sentence and its source"),
        (case("[{}]").replace(r#""source":"RFC 1""#, r#""source":"ISO""#), "`ISO` is none of the `sources`"),
        (case("[{}]").replace(&ietf, ""), "it has no steps, or no profiles"),
        (case("[{}]").replace(&ietf, &format!("{ietf},{ietf}")), "a profile has one ground"),
        (case("[]"), "case `a`: it has no steps"),
        (case(r#"[{"sends":{}}]"#), "unknown field `sends`"),
        (case(r#"[{"send":{"caller":"bob"}}]"#), "case `a`: there is no caller `bob`"),
        (case(r#"[{"send":{"method":"GET /"}}]"#), "`GET /` is no method"),
        (case(r#"[{"send":{"query":"a b"}}]"#), "`a b` is no query"),
        (case(r#"[{"send":{"headers":["a"]}}]"#), "a line of a header is written as"),
        (case(r#"[{"send":{"fields":["a\nb"]}}]"#), "a key goes over one line"),
        (case("[{}]").replace("first", "second"), "there is no caller `first`"),
        (case(r#"[{"send":{"fields":["{a"]}}]"#), "case `a`: `{a` opens"),
        (case(r#"[{"send":{"fields":["{a:1}"]}}]"#), "case `a`: `a:1` is neither"),
        (case(r#"[{"send":{"key":"a","fields":["a"]}}]"#), "exclude each other"),
        (case(r#"[{"how":{"together":1}}]"#), "2 to 1000 requests"),
        (case(r#"[{"how":"hang_up_in_body","expect":{"status":201}}]"#), "a client that hangs up gets no response"),
        (case(r#"[{"how":"until_free","while_running":[{}]}]"#), "needs a single request"),
        (case(r#"[{"expect":{"same_as":"b"}}]"#), "no earlier response is called `b`"),
        (case(r#"[{"expect":{"same_headers":["b"]}}]"#), "`same_headers` needs `same_as`"),
        (case(r#"[{"expect":{"status":{"acp":200}}}]"#), "no status is named for the profile ietf"),
    ] {
        std::fs::write(&file, &text).unwrap();
        let (status, output, errors) = run(["http://127.0.0.1:9", "--cases", file.to_str().unwrap()]).await;
        assert_eq!((status, &*output), (2, ""), "{text}");
        assert!(errors.contains(error) && errors.contains("idem-cases-"), "{text}: {errors}");
    }
    std::fs::write(&file, own(&format!("[{acp}]"))).unwrap();
    let (status, _, errors) = run(["http://127.0.0.1:9", "--cases", file.to_str().unwrap()]).await;
    assert_eq!((status, &*errors), (2, "idem: there are no cases of the profile ietf\n"));
    std::fs::remove_file(&file).unwrap();
}

/// Starts a server that answers the first `times` requests with the bytes of `answer`. Afterwards the server stops if
/// `goes`, and otherwise never answers again.
async fn scripted(answer: &'static str, mut times: usize, goes: bool) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut open = Vec::new();
        while times > 0 || !goes {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            if times > 0 {
                times -= 1;
                let _ = stream.write_all(answer.as_bytes()).await;
            } else {
                open.push(stream);
            }
        }
    });
    url
}

const COUNT: &str = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7";

#[tokio::test]
async fn a_server_that_is_unreachable_or_stops_answering_gets_no_verdict() {
    let away = {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    for (url, text) in [
        (away, "can't connect to 127.0.0.1:"),
        ("http://no-such-host.invalid".to_owned(), "can't connect to no-such-host.invalid"),
        (scripted("", 0, false).await, "no answer within 1 s"),
        (scripted("", usize::MAX, false).await, "closed the connection before the head of a response"),
        (scripted("220 mail ready\r\n", usize::MAX, false).await, "the answer is not HTTP/1.1"),
        (scripted("HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", usize::MAX, false).await, "Content-Length is `x`"),
        (scripted("HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n7", usize::MAX, false).await, "closed the connection"),
        (scripted("HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", usize::MAX, false).await, "answers 404 ``"),
        (scripted("HTTP/1.1 200 OK\r\n\r\n{\"a\":1,\"b\":2}", usize::MAX, false).await, "which is no counter"),
        // The server answers one request. Afterwards it answers no request, or stops.
        (scripted(COUNT, 1, false).await, "gone in the case `duplicate_is_replayed`: GET /count: no answer within 1 s"),
        (scripted(COUNT, 1, true).await, "gone in the case `duplicate_is_replayed`"),
    ] {
        let (status, output, errors) = run([&*url, "--timeout", "1"]).await;
        assert_eq!((status, &*output), (2, ""), "{errors}");
        assert!(errors.contains(text) && errors.contains(&url), "{text}: {errors}");
        assert_eq!(errors.lines().count(), 1, "{errors}");
    }
}

/// Starts a TLS proxy for `server`, and writes its certificate for `localhost` to `folder`. Returns its port.
async fn behind_tls(server: SocketAddr, folder: &Path) -> u16 {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"])
        .args(["-addext", "subjectAltName=DNS:localhost", "-addext", "basicConstraints=critical,CA:FALSE"])
        .args(["-keyout", &path("key.pem"), "-out", &path("cert.pem")])
        .output()
        .await
        .expect("openssl runs; ./scripts/test installs it");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let certificate = CertificateDer::from_pem_file(path("cert.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(path("key.pem")).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    let tls = TlsAcceptor::from(Arc::new(config.with_single_cert(vec![certificate], key).unwrap()));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let tls = tls.clone();
            tokio::spawn(async move {
                let mut behind = TcpStream::connect(server).await.unwrap();
                if let Ok(mut stream) = tls.accept(stream).await {
                    // Closing one side closes the other.
                    let _ = tokio::io::copy_bidirectional(&mut stream, &mut behind).await;
                }
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_tls_is_checked() {
    let folder = std::env::temp_dir().join(format!("idem-cli-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let port = behind_tls(serve("ietf", &[]).await, &folder).await;
    let url = format!("https://localhost:{port}");
    let check = async |trusted: bool| {
        let mut checker = idem([&*url, "--timeout", "60"]);
        if trusted {
            checker.env("SSL_CERT_FILE", folder.join("cert.pem"));
        }
        let output = checker.output().await.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    assert_eq!(check(true).await, (Some(0), String::new()));
    let (status, said) = check(false).await;
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("ertificate"), "{said}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn the_counter_response_may_be_chunked_and_follow_early_hints() {
    let chunked = "HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n\
                   5;x=1\r\n{\"n\":\r\n2\r\n7}\r\n0\r\ntrailer: 1\r\n\r\n";
    for answer in [chunked, COUNT, "HTTP/1.1 200 OK\r\n\r\n7"] {
        let url = scripted(answer, usize::MAX, false).await;
        let (status, output, errors) = run([&*url, "--case", "duplicate_is_replayed"]).await;
        // The counter is read; only the operation's answer is wrong.
        assert_eq!((status, &*errors), (1, ""));
        assert!(output.contains("step 1: status 200, not 201"), "{output}");
    }
}

#[tokio::test]
async fn a_closed_output_pipe_ends_the_checker_without_a_message() {
    let url = format!("http://{}", serve("ietf", &[]).await);
    let mut child = idem([&*url, "--json"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.next_line().await.unwrap().unwrap().contains("duplicate_is_replayed"));
    drop(lines);
    let output = child.wait_with_output().await.unwrap();
    assert_eq!((output.status.code(), &*output.stderr), (Some(141), &b""[..]));
}
