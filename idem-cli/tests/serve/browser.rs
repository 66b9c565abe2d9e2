//! A browser: headless Chromium, driven by the `WebDriver` protocol, which is JSON over HTTP.

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::server::exchange;

/// Key presses as `WebDriver` names them.
pub(crate) const TAB: &str = "\u{e004}";
pub(crate) const ENTER: &str = "\u{e007}";
pub(crate) const SPACE: &str = "\u{e00d}";

/// Name of the JSON member in which `WebDriver` sends the id of an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// A browser with one window; ends when dropped.
pub(crate) struct Browser {
    driver: Child,
    port: u16,
    session: String,
}

impl Browser {
    /// Starts the program that `IDEM_TEST_CHROMEDRIVER` names, or `chromedriver`, with a browser.
    pub(crate) fn start() -> Self {
        let program = std::env::var_os("IDEM_TEST_CHROMEDRIVER").unwrap_or_else(|| "chromedriver".into());
        // The driver ends if the port that it has chosen is taken in one of two families of addresses.
        let started = (0..5).find_map(|_| Self::start_driver(&program));
        let (driver, port, lines) =
            started.unwrap_or_else(|| panic!("{} does not start; run ./scripts/test", program.display()));
        // The driver would block if its output were not read.
        std::thread::spawn(move || lines.for_each(drop));
        let mut browser = Self { driver, port, session: String::new() };
        let arguments =
            ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1000,900"];
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "unhandledPromptBehavior": "ignore",
            "goog:chromeOptions": { "args": arguments },
        } } });
        let made = browser.ask("POST", "/session", &wanted);
        made["sessionId"].as_str().expect("a session").clone_into(&mut browser.session);
        browser
    }

    /// Starts the driver. Returns its process, its port and the rest of its output; `None` if it has ended.
    fn start_driver(program: &OsStr) -> Option<(Child, u16, impl Iterator<Item = String> + Send + use<>)> {
        // `setpriv` has the kernel kill the driver if this process dies first.
        let mut driver = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .arg("--port=0")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{}: {error}; run ./scripts/test", program.display()));
        let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
        let port = lines.find_map(|line| {
            line.strip_prefix("ChromeDriver was started successfully on port ")?.trim_end_matches('.').parse().ok()
        });
        port.map(|port| (driver, port, lines))
    }

    fn send(&self, method: &str, target: &str, body: &Value) -> (u16, Value) {
        let body = if method == "POST" { body.to_string() } else { String::new() };
        let host = format!("localhost:{}", self.port);
        let headers = [("host", &*host), ("content-type", "application/json; charset=utf-8")];
        let answer = exchange(self.port, method, target, &headers, &body);
        let json = serde_json::from_str(&answer.body).unwrap_or_else(|error| panic!("{error}: {answer:?}"));
        (answer.status, json)
    }

    fn ask(&self, method: &str, target: &str, body: &Value) -> Value {
        let (status, mut json) = self.send(method, target, body);
        assert_eq!(status, 200, "{method} {target}: {json}");
        json["value"].take()
    }

    fn post(&self, command: &str, body: &Value) -> Value {
        self.ask("POST", &format!("/session/{}/{command}", self.session), body)
    }

    fn read(&self, command: &str) -> Value {
        self.ask("GET", &format!("/session/{}/{command}", self.session), &Value::Null)
    }

    /// Opens a page, and waits until it is loaded.
    pub(crate) fn open(&self, url: &str) {
        self.post("url", &json!({ "url": url }));
    }

    pub(crate) fn title(&self) -> String {
        text(&self.read("title"))
    }

    /// Presses keys one after the other, where the focus is.
    pub(crate) fn press(&self, keys: &str) {
        let presses = keys.chars().flat_map(|key| {
            [
                json!({ "type": "keyDown", "value": key.to_string() }),
                json!({ "type": "keyUp", "value": key.to_string() }),
            ]
        });
        let keyboard = json!({ "type": "key", "id": "keyboard", "actions": presses.collect::<Vec<_>>() });
        self.post("actions", &json!({ "actions": [keyboard] }));
    }

    /// Returns the role and the name that a screen reader announces for the element with the focus.
    pub(crate) fn focus(&self) -> (String, String) {
        let element = self.read("element/active");
        let id = element[ELEMENT].as_str().expect("an element").to_owned();
        let of = |what: &str| text(&self.read(&format!("element/{id}/{what}")));
        (of("computedrole"), of("computedlabel"))
    }

    /// Presses Tab until the element with this role and a name that begins with `name` has the focus.
    #[track_caller]
    pub(crate) fn tab_to(&self, role: &str, name: &str) {
        let mut passed = Vec::new();
        for _ in 0..60 {
            self.press(TAB);
            let focus = self.focus();
            if focus.0 == role && focus.1.starts_with(name) {
                return;
            }
            passed.push(focus);
        }
        panic!("Tab does not lead to the {role} `{name}`, but to {passed:?}");
    }

    /// Presses Enter on an element that leads to another page, and waits for that page.
    pub(crate) fn follow(&self) {
        self.script("document.documentElement.dataset.left = 'not yet'");
        self.press(ENTER);
        let is_next = "return document.readyState === 'complete' && !document.documentElement.dataset.left";
        self.until("Enter leads to another page", is_next);
    }

    /// Waits until a script returns `true`. A script that runs while the page changes may fail.
    #[track_caller]
    #[allow(clippy::disallowed_methods, reason = "a browser runs in real time")]
    pub(crate) fn until(&self, what: &str, condition: &str) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        let body = json!({ "script": condition, "args": [] });
        let target = format!("/session/{}/execute/sync", self.session);
        while self.send("POST", &target, &body).1["value"] != json!(true) {
            assert!(std::time::Instant::now() < end, "never happened: {what}");
        }
    }

    /// Runs a script as the body of a function in the page. The page's content security policy does not apply to the
    /// script.
    pub(crate) fn script(&self, script: &str) -> Value {
        self.post("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Shows pages in the light or the dark scheme from now on.
    pub(crate) fn scheme(&self, scheme: &str) {
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.post(
            "goog/cdp/execute",
            &json!({ "cmd": "Emulation.setEmulatedMedia", "params": { "features": features } }),
        );
    }

    /// Returns whether the page shows a dialog.
    pub(crate) fn has_dialog(&self) -> bool {
        self.send("GET", &format!("/session/{}/alert/text", self.session), &Value::Null).0 == 200
    }

    /// Returns the violations that axe-core finds on this page, as lines.
    pub(crate) fn violations(&self) -> Vec<String> {
        let path = std::env::var_os("IDEM_TEST_AXE").expect("`IDEM_TEST_AXE` names no axe.min.js; run ./scripts/test");
        let axe = std::fs::read_to_string(PathBuf::from(path)).expect("axe.min.js");
        let script = format!(
            "{axe};\nconst done = arguments[arguments.length - 1];\n\
             axe.run(document, {{ resultTypes: ['violations'] }}).then(done, error => done({{ error: String(error) }}));"
        );
        let found = self.post("execute/async", &json!({ "script": script, "args": [] }));
        assert!(found["error"].is_null() && found["testEngine"]["name"] == "axe-core", "{found}");
        assert!(found["passes"].as_array().is_none_or(|rules| rules.len() > 10), "axe-core checks too little: {found}");
        let violations = found["violations"].as_array().expect("a list");
        let line = |it: &Value| {
            let targets: Vec<_> = it["nodes"].as_array().into_iter().flatten().map(|node| &node["html"]).collect();
            format!("{}: {} {targets:?}", it["id"], it["help"])
        };
        violations.iter().map(line).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The driver ends its browser when the session ends.
        if !self.session.is_empty() {
            self.send("DELETE", &format!("/session/{}", self.session), &Value::Null);
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("no text: {value}")).to_owned()
}
