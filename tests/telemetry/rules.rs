//! Runs the rules for Prometheus in Prometheus's own `promtool`, over histories of counters.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use serde_json::{Value, json};

use super::alerts::ALERTS;
use super::documents::{Selector, metric_of, selectors};

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
const PAGE: &str = include_str!("../../docs/operations.md");

/// Runs `promtool`, and asserts that it succeeds.
#[track_caller]
fn promtool(arguments: &[&str]) {
    let program = env::var("IDEM_TEST_PROMTOOL").unwrap_or_else(|_| "promtool".to_owned());
    let run = Command::new(&program).args(arguments).output();
    let Output { status, stdout, stderr } = run.unwrap_or_else(|error| {
        panic!("{program}: {error}; install Debian's `prometheus`, or name the program in IDEM_TEST_PROMTOOL")
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(status.success(), "promtool {arguments:?}: {}\n{}", text(&stdout), text(&stderr));
}

/// A folder that is removed at the end of a test.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("idem-rules-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn file(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().expect("a path of text").to_owned()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn prometheus_accepts_the_rules() {
    promtool(&["check", "rules", &format!("{ROOT}/ops/alerts.yaml")]);
}

#[test]
fn the_rules_fire_for_the_histories_in_ops() {
    promtool(&["test", "rules", &format!("{ROOT}/ops/alerts.test.yaml")]);
}

/// A series that the selector selects.
fn series(selector: &Selector) -> String {
    let own = metric_of(&selector.name).labels.iter().map(|label| {
        let matcher = selector.matchers.iter().find(|(name, ..)| name == label.name);
        let value = match matcher.map(|(_, operator, value)| (operator.as_str(), value.as_str())) {
            Some(("!=", unwanted)) => label.values.iter().find(|value| **value != unwanted).expect("another value"),
            Some((_, values)) => values.split('|').next().unwrap_or_default(),
            None => label.values.first().copied().unwrap_or("pay"),
        };
        (label.name, value.to_owned())
    });
    let others = selector.matchers.iter().filter(|(name, ..)| name == "le");
    let labels = own.chain(others.map(|(name, _, value)| (name.as_str(), value.clone())));
    let labels: Vec<_> = labels.map(|(name, value)| format!("{name}=\"{value}\"")).collect();
    format!("{}{{{}}}", selector.name, labels.join(","))
}

#[test]
fn each_rule_about_events_sees_those_in_the_first_sample_of_a_new_pod() {
    let tests = ALERTS.iter().filter(|alert| alert.expr.contains(" unless ") && alert.holds == "0m").map(|alert| {
        let (terms, limit) = alert.expr.rsplit_once(" > ").expect("a limit");
        let events = limit.parse::<u32>().expect("a number") + 1;
        // The rule about ages subtracts the replays of young records. This history has no such replay.
        let inputs = terms.split(" - ").zip([events, 0]).map(|(term, count)| {
            let selector = &selectors(term)[0];
            // The pod appears after five minutes.
            json!({ "series": series(selector), "values": format!("_x5 {count}x10") })
        });
        let inputs: Vec<_> = inputs.collect();
        let expr = format!("count(ALERTS{{alertname=\"{}\",alertstate=\"firing\"}})", alert.name);
        json!({
            "name": alert.name, "interval": "1m", "input_series": inputs,
            "promql_expr_test": [
                { "expr": expr, "eval_time": "4m", "exp_samples": [] },
                { "expr": expr, "eval_time": "6m", "exp_samples": [{ "labels": "{}", "value": 1 }] },
            ],
        })
    });
    let tests: Vec<Value> = tests.collect();
    assert!(tests.len() > 10, "{} rules", tests.len());
    let scratch = Scratch::new("pods");
    let rules = fs::canonicalize(Path::new(ROOT).join("ops/alerts.yaml")).unwrap();
    let all = json!({ "rule_files": [rules], "evaluation_interval": "1m", "tests": tests });
    promtool(&["test", "rules", &scratch.file("pods.yaml", &all.to_string())]);
}

#[test]
fn the_command_of_the_page_makes_the_links_of_the_alerts_absolute() {
    let command = PAGE.lines().find(|line| line.starts_with("sed ") && line.contains("alerts.yaml"));
    let command = command.expect("the page has the command");
    let run = Command::new("sh").args(["-c", command]).current_dir(ROOT).output().unwrap();
    let (rules, wrong) = (String::from_utf8(run.stdout).unwrap(), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{wrong}");
    let links: Vec<_> = rules.lines().filter_map(|line| line.trim().strip_prefix("runbook_url: ")).collect();
    assert_eq!(links.len(), ALERTS.len());
    for (link, alert) in links.iter().zip(ALERTS) {
        assert!(link.starts_with("https://") && link.ends_with(&format!("#{}", alert.name.to_lowercase())), "{link}");
    }
    let scratch = Scratch::new("links");
    promtool(&["check", "rules", &scratch.file("alerts.yaml", &rules)]);
}
