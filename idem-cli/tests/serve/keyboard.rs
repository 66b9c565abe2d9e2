//! The pages in a browser: by keyboard alone, as a screen reader reads them, and with texts that contain markup.

use idem_runtime::Key;
use idem_runtime::record::State;
use idem_runtime::{Store as _, StoreExt as _};
use serde_json::json;

use super::browser::{Browser, SPACE, TAB};
use super::server::{Server, cut_off};
use super::support::{Records, completed, interrupted, key, pending};

#[tokio::test]
async fn a_person_decides_by_keyboard_alone() {
    let records = Records::new().await;
    interrupted(&records.store, "42").await;
    let server = Server::start(&records, &["--allow-decisions"]);
    let browser = Browser::start();
    browser.open(&server.url("/"));
    // The first stop of Tab skips the header.
    browser.press(TAB);
    assert_eq!(browser.focus(), ("link".to_owned(), "Skip to the content".to_owned()));
    browser.tab_to("link", "Enter the token");
    browser.follow();
    browser.tab_to("textbox", "Token that idem serve has printed");
    browser.press(server.token.as_ref().unwrap());
    browser.follow();
    assert_eq!(browser.title(), "Now - idem");
    // From the first page to the decision.
    browser.tab_to("link", "pay/42");
    browser.follow();
    assert_eq!(browser.title(), "pay/42 - idem");
    browser.tab_to("link", "Resolve: the effect happened");
    browser.follow();
    browser.tab_to("radio", "It completed with this result");
    browser.press(SPACE);
    browser.tab_to("textbox", "Result or error");
    browser.press("{\"receipt\":7}");
    browser.tab_to("textbox", "Reason");
    browser.press("INC-7");
    browser.tab_to("button", "Resolve");
    browser.follow();
    assert_eq!(browser.title(), "pay/42 - idem");
    let message = browser.script("return document.querySelector('[role=status]').innerText");
    let expected = "resolved `pay/42`, attempt 1 as completed with 13 bytes of json; duplicates are told so";
    assert_eq!(message, json!(expected));
    let found = records.store.inspect(&key("42")).await.unwrap().unwrap();
    assert!(matches!(found.record.state, State::Completed(_)), "{found:?}");
    assert_eq!((found.decided_by(), found.decided_reason()), (Some("alice"), Some("INC-7")));
}

#[tokio::test]
async fn a_screen_reader_finds_names_headings_and_colors_in_order() {
    let records = Records::new().await;
    pending(&records.store, "running").await;
    interrupted(&records.store, "odd").await;
    completed(&records.store, "done", b"1").await;
    let server = Server::start(&records, &["--allow-decisions", "--results"]);
    let browser = Browser::start();
    let targets = [
        "/session",
        "/",
        "/?refresh=on",
        "/records?state=completed",
        "/counts",
        "/record?key=pay%2Fdone&result=show",
        "/record?key=pay%2Fodd",
        "/decide?key=pay%2Fodd&verb=resolve",
        "/decide?key=pay%2Frunning&verb=release",
        "/record?key=pay%2Fabsent",
    ];
    for scheme in ["light", "dark"] {
        browser.scheme(scheme);
        for target in targets {
            browser.open(&server.url(target));
            let mut violations = browser.violations();
            // axe-core forbids a refresh that moves the focus. This refresh is off by default, and the page can end it.
            if target == "/?refresh=on" {
                violations.retain(|it| !it.starts_with("\"meta-refresh\""));
            }
            assert!(violations.is_empty(), "{target} in the {scheme} scheme: {violations:#?}");
            if target == "/session" && scheme == "light" {
                browser.tab_to("textbox", "Token");
                browser.press(server.token.as_ref().unwrap());
                browser.follow();
            }
        }
    }
    // Each stop of Tab has a name.
    for target in targets {
        browser.open(&server.url(target));
        browser.press(TAB);
        let first = browser.focus();
        for _ in 0..60 {
            let (role, name) = browser.focus();
            // After the last stop the focus leaves the page.
            if role == "none" {
                break;
            }
            assert!(!name.is_empty(), "{target}: a {role} without a name");
            browser.press(TAB);
            if browser.focus() == first {
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_hostile_record_runs_no_script_in_a_browser() {
    const TEXTS: [&str; 4] = [
        "<script>alert(1)</script>",
        "\"><img src=x onerror=alert(1)>",
        "'--><svg/onload=alert(1)>",
        "</title></textarea></pre><iframe srcdoc='<script>parent.alert(1)</script>'>",
    ];
    let records = Records::new().await;
    let server = Server::start(&records, &["--results"]);
    let browser = Browser::start();
    for text in TEXTS {
        let odd = Key::new("odd", text).unwrap();
        cut_off(&records.store, &odd).await;
        let operator = records.store.operator().by(text).reason(text);
        let found = operator.inspect(&odd).await.unwrap().unwrap();
        let result = idem_runtime::operator::Resolution::completed(&text.to_owned()).unwrap();
        operator.resolve(&odd, &found, result).await.unwrap();
        browser.open(&server.url("/records"));
        assert!(!browser.has_dialog(), "{text}");
        browser.tab_to("link", &odd.to_string());
        browser.follow();
        browser.tab_to("link", "Show the result");
        browser.follow();
        assert!(!browser.has_dialog(), "{text}");
        let script = "return document.querySelectorAll('script, img, svg, iframe, [onload], [onerror]').length";
        assert_eq!(browser.script(script), json!(0), "{text}");
        let shown = "return [document.querySelector('h1').innerText, document.querySelector('pre').innerText]";
        assert_eq!(browser.script(shown), json!([odd.to_string(), serde_json::to_string(text).unwrap()]));
    }
}

#[tokio::test]
async fn a_page_shows_a_new_record_while_its_refresh_is_on() {
    let records = Records::new().await;
    let server = Server::start(&records, &["--every", "1s"]);
    let browser = Browser::start();
    browser.open(&server.url("/?refresh=on"));
    interrupted(&records.store, "new").await;
    let is_there = "return document.body.innerText.includes('pay/new')";
    browser.until("the page refreshes", is_there);
}
