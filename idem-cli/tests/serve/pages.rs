//! The pages over HTTP.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use idem_runtime::record::{State, StoredResult};
use idem_runtime::store::Finish;
use idem_runtime::{Key, SqliteStore, Store, StoreExt as _};
use idem_tests::sqlite::raw;

use super::server::{Server, cut_off};
use super::support::{Records, command, completed, doubtful, interrupted, key, pending, run, state};

/// Texts that, without an escape, would be markup, end a string, or change the direction of the page's text.
const HOSTILE: [&str; 6] = [
    "<script>document.title='taken'</script>",
    "\"><img src=x onerror=\"document.title='taken'\">",
    "'--><svg/onload=document.title='taken'>",
    "&lt;b&gt; &amp; %3Cscript%3E",
    "\u{202e}desrever\u{202c} \u{2067}אבג\u{2069}",
    "</title></td></dd></pre></textarea><h1>taken</h1>",
];

#[tokio::test]
async fn the_first_page_shows_stuck_records_before_running_ones() {
    let records = Records::new().await;
    pending(&records.store, "running").await;
    // The lease of `late` has lapsed before its body began, and the lease of `lost` after its body began.
    for text in ["late", "lost"] {
        pending(&records.store, text).await;
    }
    let file = raw(&records.folder.file());
    file.execute_batch(
        "UPDATE idem_records SET lapses_at = 1 WHERE key IN ('1/pay/late', '1/pay/lost');
         UPDATE idem_records SET begun = 0 WHERE key = '1/pay/late'",
    )
    .unwrap();
    interrupted(&records.store, "odd").await;
    completed(&records.store, "done", b"1").await;
    let page = Server::start(&records, &[]).get("/").has(200, "sqlite, answered in");
    let place = |text: &str| page.body.find(text).unwrap_or_else(|| panic!("no `{text}` in {}", page.body));
    let order = [
        place("1 running, 2 lapsed, 1 interrupted"),
        place("<h2>Waits for a decision</h2>"),
        place(">pay/odd</a>"),
        place(">pay/lost</a>"),
        place("<h2>Stuck</h2>"),
        place(">pay/late</a>"),
        place("<h2>Running</h2>"),
        place(">pay/running</a>"),
    ];
    assert!(order.is_sorted(), "{order:?} in {}", page.body);
    assert!(!page.body.contains("pay/done"), "{}", page.body);
}

#[tokio::test]
async fn the_refresh_of_the_first_page_is_off_until_a_person_switches_it_on() {
    let records = Records::new().await;
    let server = Server::start(&records, &["--every", "7s"]);
    let page = server.get("/").has(200, "href=\"/?refresh=on\">Refresh this page every 7 s</a>");
    assert!(!page.body.contains("http-equiv"), "{}", page.body);
    let page = server.get("/?refresh=on").has(200, "<meta http-equiv=\"refresh\" content=\"7\">");
    page.has(200, "<a href=\"/\">Stop the refresh of this page</a>");
}

#[tokio::test]
async fn the_page_of_a_record_counts_its_steps_and_names_the_steps_in_doubt() {
    let records = Records::new().await;
    doubtful(&records.store, "42").await;
    let page = Server::start(&records, &[]).get("/record?key=pay%2F42").has(200, "<dt>steps</dt>");
    for text in ["2, 1 in doubt: `book`", "`idem resolve --step` records that"] {
        assert!(page.body.contains(text), "no `{text}` in {}", page.body);
    }
    assert!(!page.body.contains("4111"), "{}", page.body);
}

#[tokio::test]
async fn the_page_of_a_record_tells_its_story_without_its_result() {
    let records = Records::new().await;
    completed(&records.store, "42", br#"{"card":"4111"}"#).await;
    let server = Server::start(&records, &[]);
    let page = server.get("/record?key=pay%2F42").has(200, "<dd class=\"plain\">completed</dd>");
    for text in
        ["<h1>pay/42</h1>", "<dt>held by</dt>", "<dt>began</dt>", "15 bytes of json", "start idem serve --results"]
    {
        assert!(page.body.contains(text), "no `{text}` in {}", page.body);
    }
    for target in ["/record?key=pay%2F42", "/record?key=pay%2F42&result=show", "/records", "/", "/counts"] {
        assert!(!server.get(target).body.contains("4111"), "{target} shows the result");
    }
    let server = Server::start(&records, &["--results"]);
    let page = server.get("/record?key=1%2Fpay%2F42").has(200, "Show the result, which may be confidential");
    assert!(!page.body.contains("4111"), "{}", page.body);
    server.get("/record?key=pay%2F42&result=show").has(200, "{&quot;card&quot;:&quot;4111&quot;}");
    server.get("/record?key=pay%2F43").has(404, "there is no record");
    server.get("/record?key=nonsense").has(400, "is no key");
    server.get("/elsewhere").has(404, "There is no such page.");
}

#[tokio::test]
async fn the_counts_lead_to_the_records_that_were_counted() {
    let records = Records::new().await;
    completed(&records.store, "1", b"1").await;
    interrupted(&records.store, "2").await;
    let server = Server::start(&records, &[]);
    server.get("/counts").has(200, "<a href=\"/records?scope=pay&amp;state=completed\">1</a>");
    let page = server.get("/records?scope=pay&state=completed").has(200, ">pay/1</a>");
    assert!(!page.body.contains("pay/2"), "{}", page.body);
    server.get("/records?scope=other").has(200, "None.");
    server.get("/records?state=odd").has(400, "it is one of");
    server.get("/records?older=1").has(400, "write a number");
}

#[tokio::test]
async fn a_long_list_is_read_page_by_page() {
    let records = Records::new().await;
    for number in 0..130 {
        cut_off(&records.store, &Key::new("many", format!("{number:03}")).unwrap()).await;
    }
    let server = Server::start(&records, &[]);
    let first = server.get("/records?state=interrupted").has(200, ">many/099</a>");
    assert!(!first.body.contains("many/100"), "{}", first.body);
    let (_, rest) = first.body.split_once("<a href=\"/records?").expect("a link to the rest");
    let rest = rest.split('"').next().unwrap().replace("&amp;", "&");
    let second = server.get(&format!("/records?{rest}")).has(200, ">many/129</a>");
    assert!(!second.body.contains("many/099") && !second.body.contains("Next records"), "{}", second.body);
}

#[tokio::test]
async fn every_answer_forbids_scripts_frames_and_copies() {
    let records = Records::new().await;
    let server = Server::start(&records, &["--allow-decisions"]);
    for target in ["/", "/record?key=a", "/style.css", "/elsewhere", "/decide?key=a&verb=reopen", "/session"] {
        let answer = server.get(target);
        let policy = answer.header("content-security-policy");
        assert!(policy.starts_with("default-src 'none';") && policy.contains("frame-ancestors 'none'"), "{answer:?}");
        assert!(!policy.contains("script") && !policy.contains("unsafe"), "{policy}");
        assert_eq!(answer.header("cache-control"), "no-store", "{target}");
        assert_eq!(answer.header("x-content-type-options"), "nosniff", "{target}");
        assert!(!answer.body.contains("<script") && !answer.body.contains("style=\""), "{target}: {}", answer.body);
    }
}

#[tokio::test]
async fn a_request_for_another_host_shows_nothing() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &[]);
    for host in ["evil.example", &format!("evil.example:{}", server.port), "127.0.0.1"] {
        let answer = server.send("GET", "/", &[("host", host)], "").has(421, "only at the address");
        assert!(!answer.body.contains("pay/42"), "{}", answer.body);
    }
    let local = format!("localhost:{}", server.port);
    server.send("GET", "/", &[("host", &local)], "").has(200, "pay/42");
    // The listener has no other address.
    let others = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
        socket.connect("192.0.2.1:9")?;
        socket.local_addr()
    });
    if let Ok(own) = others.map(|address| address.ip())
        && !own.is_loopback()
    {
        assert!(std::net::TcpStream::connect((own, server.port)).is_err(), "{own} answers");
    }
}

#[tokio::test]
async fn a_read_only_page_makes_no_decision() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &[]);
    let page = server.get("/record?key=pay%2F42").has(200, "Read-only. idem serve --allow-decisions");
    assert!(!page.body.contains("/decide") && server.token.is_none(), "{}", page.body);
    let target = "/decide?key=pay%2F42&verb=reopen";
    server.get(target).has(403, "This page is read-only");
    let seen = records.revision("pay/42");
    server.send("POST", target, &[], &format!("seen={seen}&form_token=")).has(403, "This page is read-only");
    server.send("POST", "/session", &[], "token=").has(403, "This page is read-only");
    server.get("/session").has(404, "no such page");
    server.send("PUT", "/", &[], "").has(405, "");
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
}

#[tokio::test]
async fn a_decision_names_its_operator_and_its_reason() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &["--allow-decisions"]);
    let cookie = server.sign_in();
    let page = server.open(&cookie, "/record?key=pay%2F42").has(200, "Decisions are made by alice.");
    for verb in ["resolve", "reopen", "forget"] {
        assert!(page.body.contains(&format!("&amp;verb={verb}\"")), "no {verb} in {}", page.body);
    }
    for verb in ["replace", "discard", "release"] {
        assert!(!page.body.contains(&format!("&amp;verb={verb}\"")), "{verb} in {}", page.body);
    }
    let target = "/decide?key=pay%2F42&verb=resolve";
    let form = server.open(&cookie, target).has(200, "<h1>Resolve `pay/42`, attempt 1?</h1>");
    let hidden = format!("form_token={}&seen={}&reason=INC-7", form.field("form_token"), form.field("seen"));
    let send = |body: &str| server.send("POST", target, &[("cookie", &cookie)], body);
    // The answer to a form with a mistake keeps the typed values.
    send(&hidden).has(400, "choose how the operation ended; nothing was changed").has(400, "value=\"INC-7\"");
    send(&format!("{hidden}&end=completed&result=%7B")).has(400, "it is not JSON, at line 1 column 1");
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    let done = send(&format!("{hidden}&end=completed&result=%7B%22receipt%22%3A7%7D%0D%0A")).has(303, "");
    assert_eq!(done.header("location"), "/record?key=1%2Fpay%2F42");
    let found = records.store.inspect(&key("42")).await.unwrap().unwrap();
    assert_eq!((found.decided_by(), found.decided_reason()), (Some("alice"), Some("INC-7")));
    let State::Completed(StoredResult::Encoded { bytes, .. }) = &found.record.state else { panic!("{found:?}") };
    assert_eq!(bytes, "{\"receipt\":7}");
    // The message is shown once.
    let message = "resolved `pay/42`, attempt 1 as completed with 13 bytes of json; duplicates are told so";
    server.open(&cookie, done.header("location")).has(200, message);
    assert!(!server.open(&cookie, "/").body.contains("resolved"));
}

#[tokio::test]
async fn each_kind_of_decision_is_made_by_its_form() {
    let records = Records::new().await;
    let store = &records.store;
    let server = Server::start(&records, &["--allow-decisions", "--by", "bob"]);
    let cookie = server.sign_in();
    let decides = |text: &str, verb: &str, fields: &str| {
        let target = format!("/decide?key=pay%2F{text}&verb={verb}");
        let form = server.open(&cookie, &target);
        let body = format!("form_token={}&seen={}&{fields}", form.field("form_token"), form.field("seen"));
        server.send("POST", &target, &[("cookie", &cookie)], &body).has(303, "")
    };
    for text in ["reopen", "unknown", "failed"] {
        interrupted(store, text).await;
    }
    pending(store, "release").await;
    for text in ["discard", "replace", "forget"] {
        completed(store, text, b"1").await;
    }
    decides("reopen", "reopen", "");
    decides("unknown", "resolve", "end=completed-without-result");
    decides("failed", "resolve", "end=failed&result=%22no+money%22");
    decides("release", "release", "");
    decides("discard", "discard", "");
    decides("replace", "replace", "end=failed-without-result");
    assert_eq!(decides("forget", "forget", "").header("location"), "/");
    for (text, expected) in [
        ("reopen", Some("released")),
        ("unknown", Some("completed")),
        ("failed", Some("failed")),
        ("release", Some("interrupted")),
        ("discard", Some("released")),
        ("replace", Some("failed")),
        ("forget", None),
    ] {
        assert_eq!(state(store, text).await, expected, "{text}");
    }
    let found = store.inspect(&key("reopen")).await.unwrap().unwrap();
    assert_eq!(found.decided_by(), Some("bob"));
}

#[tokio::test]
async fn a_decision_about_a_record_that_has_changed_is_refused() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &["--allow-decisions"]);
    let cookie = server.sign_in();
    let target = "/decide?key=pay%2F42&verb=reopen";
    let form = server.open(&cookie, target);
    let body = format!("form_token={}&seen={}", form.field("form_token"), form.field("seen"));
    let seen = records.revision("pay/42");
    records.idem(&["resolve", "pay/42", "--without-result", "--seen", &seen, "--by", "carol", "--yes"]).ends(0);
    let refused = server.send("POST", target, &[("cookie", &cookie)], &body);
    refused.has(409, "carol has decided about it").has(409, "role=\"alert\"").has(409, "completed");
    assert_eq!(state(&records.store, "42").await, Some("completed"));
    let nothing = server.send("POST", "/decide?key=pay%2Fno&verb=reopen", &[("cookie", &cookie)], &body);
    nothing.has(404, "there is no record");
}

#[tokio::test]
async fn a_form_without_session_or_of_another_site_decides_nothing() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &["--allow-decisions"]);
    let target = "/decide?key=pay%2F42&verb=reopen";
    server.get(target).has(403, "Enter the token");
    server.send("POST", "/session", &[], "token=guess").has(403, "The token is wrong");
    let cookie = server.sign_in();
    let again = format!("token={}", server.token.as_ref().unwrap());
    server.send("POST", "/session", &[], &again).has(403, "was used before");
    let form = server.open(&cookie, target);
    let body = format!("form_token={}&seen={}", form.field("form_token"), form.field("seen"));
    let send = |headers: &[(&str, &str)], body: &str| server.send("POST", target, headers, body);
    let own = ("cookie", cookie.as_str());
    send(&[], &body).has(403, "Enter the token");
    send(&[("cookie", "idem_session=1")], &body).has(403, "Enter the token");
    send(&[own], &format!("seen={}", form.field("seen"))).has(403, "not sent by this page");
    send(&[own, ("origin", "http://evil.example")], &body).has(403, "not sent by this page");
    send(&[own, ("sec-fetch-site", "cross-site")], &body).has(403, "not sent by this page");
    send(&[own], &format!("form_token={}", form.field("form_token"))).has(400, "does not name the record");
    send(&[own, ("content-length", "1048577")], &body).has(400, "more than 1048576 bytes");
    assert_eq!(state(&records.store, "42").await, Some("interrupted"));
    send(&[own, ("origin", &server.url("")), ("sec-fetch-site", "same-origin")], &body).has(303, "");
    assert_eq!(state(&records.store, "42").await, Some("released"));
}

#[tokio::test]
async fn no_text_of_a_record_is_markup() {
    let records = Records::new().await;
    let store = SqliteStore::options().holder("<b>worker</b>\"'").open(records.folder.file()).await.unwrap();
    for hostile in HOSTILE {
        let odd = Key::new("odd", hostile).unwrap();
        cut_off(&store, &odd).await;
        let operator = store.operator().by(format!("{hostile}\u{0}")).reason(format!("{hostile}\u{0}\u{1b}[2J"));
        let found = operator.inspect(&odd).await.unwrap().unwrap();
        let result = format!("{}\u{0}", serde_json::to_string(hostile).unwrap());
        let codec = idem_runtime::codec::CodecName::new(b"own").unwrap();
        let result = StoredResult::Encoded { codec, bytes: result.into_bytes().into() };
        operator.resolve(&odd, &found, Finish::Completed(result).into()).await.unwrap();
    }
    let server = Server::start(&records, &["--allow-decisions", "--results", "--by", HOSTILE[0]]);
    let cookie = server.sign_in();
    let mut targets = ["/", "/records", "/counts"].map(str::to_owned).to_vec();
    for hostile in HOSTILE {
        let percent =
            |text: &str| -> String { text.bytes().fold(String::new(), |text, byte| format!("{text}%{byte:02X}")) };
        let (encoded, typed) = (percent(Key::new("odd", hostile).unwrap().as_str()), percent(hostile));
        targets.push(format!("/record?key={encoded}&result=show"));
        targets.push(format!("/decide?key={encoded}&verb=replace"));
        targets.push(format!("/record?key={typed}"));
        targets.push(format!("/records?scope={typed}&state="));
        targets.push(format!("/records?state={typed}"));
    }
    for target in targets {
        let page = server.open(&cookie, &target);
        assert!([200, 400, 404].contains(&page.status), "{target}: {page:?}");
        let markup = tags(&page.body);
        for tag in &markup {
            let name = tag.trim_start_matches('/').split([' ', '>']).next().unwrap();
            assert!(KNOWN.contains(&name), "{target}: `<{tag}>` in {}", page.body);
            // The parts outside of the quoted values hold the names of attributes.
            let names: String = tag.split('"').step_by(2).collect();
            assert!(!names.contains(" on") && !names.contains("src"), "{target}: `<{tag}>`");
        }
        let hidden =
            |c: char| (c.is_control() && c != '\n') || ('\u{202a}'..='\u{202e}').contains(&c) || c == '\u{2067}';
        assert!(!page.body.contains(hidden), "{target}: {:?}", page.body);
    }
}

/// Names of the elements that the program writes.
const KNOWN: [&str; 44] = [
    "!doctype", "a", "body", "button", "caption", "dd", "div", "dl", "dt", "fieldset", "footer", "form", "h1", "h2",
    "head", "header", "html", "input", "label", "legend", "li", "link", "main", "meta", "nav", "option", "p", "pre",
    "select", "table", "tbody", "td", "textarea", "tfoot", "th", "thead", "title", "tr", "ul", "bdi", "span", "strong",
    "time", "section",
];

/// Tags of a page: each text from `<` to the `>` that is not inside of an attribute's value.
fn tags(page: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = page;
    while let Some((_, after)) = rest.split_once('<') {
        let mut is_value = false;
        let end = after.find(|c| {
            is_value ^= c == '"';
            c == '>' && !is_value
        });
        let end = end.unwrap_or_else(|| panic!("a tag without end: {after}"));
        found.push(&after[..end]);
        rest = &after[end..];
    }
    found
}

#[tokio::test]
async fn a_damaged_record_can_only_be_forgotten() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    raw(&records.folder.file()).execute_batch("UPDATE idem_records SET state = 'half done'").unwrap();
    let server = Server::start(&records, &["--allow-decisions"]);
    let cookie = server.sign_in();
    server.open(&cookie, "/").has(200, "1 damaged");
    let page = server.open(&cookie, "/record?key=pay%2F42").has(200, "verb=forget");
    assert_eq!(page.body.matches("&amp;verb=").count(), 1, "{}", page.body);
    server.open(&cookie, "/decide?key=pay%2F42&verb=forget").has(200, "which is damaged");
}

#[tokio::test]
async fn serve_prints_what_its_page_shows() {
    let (_, section) = include_str!("../../../docs/cli.md").split_once("\n## Serve\n").expect("the section");
    let (_, block) = section.split_once("```console\n").expect("a block");
    let mut lines = block.split("```").next().unwrap().lines();
    let words = lines.next().and_then(|line| line.strip_prefix("$ idem ")).expect("a command");
    let records = Records::new().await;
    let mut command = command(words.split(' '));
    let mut child = command.env("IDEM_STORE", records.url()).stdout(Stdio::piped()).spawn().unwrap();
    let printed = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let printed: Vec<_> = printed.take(2).collect();
    child.kill().unwrap();
    child.wait().unwrap();
    // Ports and tokens differ in each run.
    let shape = |line: &str| line.replace(|c: char| c.is_ascii_digit(), "");
    let token = |line: &str| line.rsplit(' ').next().unwrap().len();
    let shown: Vec<_> = lines.collect();
    assert_eq!((shown.len(), printed.len()), (2, 2), "{printed:?}");
    assert_eq!(shape(shown[0]), shape(&printed[0]));
    assert_eq!(shown[1].rsplit_once(' ').unwrap().0, printed[1].rsplit_once(' ').unwrap().0);
    assert_eq!(token(shown[1]), token(&printed[1]));
}

#[test]
fn serve_refuses_wrong_use_before_it_listens() {
    let url = "redis://127.0.0.1:1";
    run(command(["serve"]).env("IDEM_STORE", url)).ends(1).complains("--scan");
    run(command(["serve", "--scan"]).env("IDEM_STORE", url)).ends(3);
    run(&mut command(["serve", "--by", "alice"])).ends(2).complains("--allow-decisions");
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let folder = idem_tests::sqlite::Folder::new();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    drop(runtime.block_on(SqliteStore::open(folder.file())).unwrap());
    let store = format!("sqlite:{}", folder.file().display());
    run(command(["serve", "--port", &port]).env("IDEM_STORE", store)).ends(1).complains("choose another --port");
}
