//! Documents that are generated from the table of metrics, the scenarios and the alerts: the page of metrics, the rules
//! for Prometheus and the dashboard for Grafana. `IDEM_UPDATE=1` rewrites the documents.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

use idem_runtime::metrics::{Kind, Metric, TABLE};
use idem_runtime::{Key, Operation, StoreErrorKind, StoreExt as _, observe};
use idem_tests::{Fault, StoreCall, settle};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
use serde_json::{Value, json};

use super::alerts::{ALERTS, Alert, Panel, ROWS, Severity};
use super::scenarios::{LEASE, POLICY, SCENARIOS, SCOPE, World};

/// Runbook in the links of the alerts. A command in `docs/operations.md` replaces this text by the address of an
/// organisation's own page.
const RUNBOOK: &str = "docs/operations.md";

/// Compares the file `name` of the repository with its expected text, or writes this text under `IDEM_UPDATE=1`.
fn is_up_to_date(name: &str, expected: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    if env::var_os("IDEM_UPDATE").is_some() {
        fs::write(&path, expected).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(written == expected, "{name} is out of date: run the test with IDEM_UPDATE=1, and look at the difference");
}

fn code(values: impl IntoIterator<Item = impl AsRef<str>>) -> String {
    let quoted: Vec<_> = values.into_iter().map(|value| format!("`{}`", value.as_ref())).collect();
    quoted.join(", ")
}

fn metrics_page() -> String {
    let mut page = String::from(include_str!("metrics_head.md"));
    page.push_str("| metric | kind | labels | meaning |\n|---|---|---|---|\n");
    for Metric { name, kind, labels, help, unit, .. } in TABLE {
        let kind = match kind {
            Kind::Counter => "counter".to_owned(),
            Kind::Gauge => "gauge".to_owned(),
            _ => format!("histogram, {unit}"),
        };
        let labels = code(labels.iter().map(|label| label.name));
        writeln!(page, "| `{name}` | {kind} | {labels} | {help} |").unwrap();
    }
    page.push_str("\n## Labels\n\n`scope` is the scope of the handler, `store` the name of the store. All other labels have a fixed set of values:\n\n");
    page.push_str("| label | of | values |\n|---|---|---|\n");
    for metric in TABLE {
        for label in metric.labels.iter().filter(|label| !label.values.is_empty()) {
            writeln!(page, "| `{}` | `{}` | {} |", label.name, metric.name, code(label.values)).unwrap();
        }
    }
    page.push_str("\n## Buckets\n\n| histogram | upper bounds |\n|---|---|\n");
    for metric in TABLE.iter().filter(|metric| matches!(metric.kind, Kind::Histogram { .. })) {
        let bounds: Vec<_> = metric.buckets().iter().map(f64::to_string).collect();
        writeln!(page, "| `{}` | {} |", metric.name, bounds.join(", ")).unwrap();
    }
    page.push_str(include_str!("metrics_scenarios.md"));
    page.push_str("| what happens | `outcome` | message | log, from `INFO` up | uncertain |\n|---|---|---|---|---|\n");
    for it in SCENARIOS {
        let events: Vec<_> = it.events.iter().map(|(level, text)| format!("{level}: {text}")).collect();
        let uncertain = it.counts.iter().find(|(metric, ..)| *metric == "idem_uncertain_total");
        let uncertain = uncertain.map(|(_, _, kind)| format!("`{kind}`")).unwrap_or_default();
        let disposition = it.disposition.unwrap_or("none: the call did not return");
        writeln!(page, "| {} | `{}` | {disposition} | {} | {uncertain} |", it.name, it.outcome, events.join("; "))
            .unwrap();
    }
    page
}

fn alerts_yaml() -> String {
    let mut text = String::from(
        "# Rules for Prometheus. Made from the table of metrics by tests/telemetry.rs (IDEM_UPDATE=1): change them there.\n",
    );
    text.push_str("groups:\n  - name: idem\n    rules:\n");
    // Writes a text as a YAML string in single quotes.
    let quoted = |text: &str| format!("'{}'", text.replace('\'', "''"));
    for Alert { name, expr, holds, severity, summary } in ALERTS {
        writeln!(text, "      - alert: {name}\n        expr: {}\n        for: {holds}", quoted(expr)).unwrap();
        writeln!(text, "        labels:\n          severity: {}", severity.name()).unwrap();
        writeln!(text, "        annotations:\n          summary: {}", quoted(summary)).unwrap();
        writeln!(text, "          runbook_url: {RUNBOOK}#{}", name.to_lowercase()).unwrap();
    }
    text
}

fn dashboard() -> String {
    let source = || json!({ "type": "prometheus", "uid": "${datasource}" });
    let mut panels = Vec::new();
    let mut top = 0;
    for row in ROWS {
        let next = panels.len() + 1;
        panels.push(json!({
            "id": next, "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": { "x": 0, "y": top, "w": 24, "h": 1 },
        }));
        top += 1;
        for (at, Panel { title, expr, legend, unit }) in row.panels.iter().enumerate() {
            let next = panels.len() + 1;
            panels.push(json!({
                "id": next, "type": "timeseries", "title": title, "description": described(expr), "datasource": source(),
                "gridPos": { "x": at % 3 * 8, "y": top + at / 3 * 8, "w": 8, "h": 8 },
                "fieldConfig": { "defaults": { "unit": unit, "min": 0, "custom": { "fillOpacity": 10 } }, "overrides": [] },
                "options": { "legend": { "displayMode": "list", "placement": "bottom" }, "tooltip": { "mode": "multi" } },
                "targets": [{ "refId": "A", "datasource": source(), "expr": expr, "legendFormat": legend }],
            }));
        }
        top += row.panels.len().div_ceil(3) * 8;
    }
    let dashboard = json!({
        "title": "idem", "uid": "idem", "tags": ["idem"], "schemaVersion": 39, "version": 1, "editable": true,
        "refresh": "30s", "time": { "from": "now-6h", "to": "now" },
        "templating": { "list": [
            { "name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source" },
            {
                "name": "scope", "type": "query", "label": "Handler", "datasource": source(), "refresh": 2,
                "query": { "query": "label_values(idem_calls_total, scope)", "refId": "scope" },
                "includeAll": true, "multi": true, "allValue": ".*", "current": { "text": "All", "value": "$__all" },
            },
        ] },
        "panels": panels,
    });
    serde_json::to_string_pretty(&dashboard).unwrap() + "\n"
}

/// Meanings of the metrics that an expression names.
fn described(expr: &str) -> String {
    let metrics = selectors(expr).into_iter().map(|selector| metric_of(&selector.name).help);
    metrics.collect::<BTreeSet<_>>().into_iter().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_page_of_metrics_is_up_to_date() {
    is_up_to_date("docs/metrics.md", &metrics_page());
}

#[test]
fn the_alerts_are_up_to_date() {
    is_up_to_date("ops/alerts.yaml", &alerts_yaml());
}

#[test]
fn the_dashboard_is_up_to_date() {
    is_up_to_date("ops/grafana.json", &dashboard());
}

#[test]
fn every_alert_names_its_meaning_and_the_next_steps() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/operations.md")).unwrap();
    let entries: Vec<_> = page.split("\n### ").skip(1).filter(|entry| entry.starts_with("Idem")).collect();
    let named: Vec<_> = entries.iter().map(|entry| entry.lines().next().unwrap_or_default()).collect();
    let alerts: Vec<_> = ALERTS.iter().map(|alert| alert.name).collect();
    assert_eq!(named, alerts);
    for (entry, alert) in entries.iter().zip(ALERTS) {
        for part in ["*Means*", "*Look at*", "*Do*"] {
            assert!(entry.contains(part), "{} without {part}", alert.name);
        }
        let told = if alert.severity == Severity::Page { "**Page.**" } else { "**Ticket.**" };
        assert!(entry.contains(told), "{}: {told}", alert.name);
    }
}

/// Series that an expression selects: name, and conditions on labels.
#[derive(Debug)]
pub(super) struct Selector {
    pub(super) name: String,
    pub(super) matchers: Vec<(String, String, String)>,
}

/// Parses the series that `expr` selects.
pub(super) fn selectors(expr: &str) -> Vec<Selector> {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = expr;
    while let Some(at) = rest.find("idem_") {
        let named = &rest[at..];
        let end = named.find(|c| !is_word(c)).unwrap_or(named.len());
        let (name, behind) = named.split_at(end);
        let labels = behind.strip_prefix('{').and_then(|labels| labels.split_once('}'));
        let matchers = labels.map_or(Vec::new(), |(labels, _)| {
            let parts = labels.split(',').map(|matcher| {
                let (label, rest) = matcher.split_at(matcher.find(|c| !is_word(c)).expect("an operator"));
                let (operator, value) = rest.split_once('"').expect("a value in quotes");
                (label.to_owned(), operator.to_owned(), value.trim_end_matches('"').to_owned())
            });
            parts.filter(|(_, _, value)| !value.starts_with('$')).collect()
        });
        found.push(Selector { name: name.to_owned(), matchers });
        rest = behind;
    }
    found
}

/// Metric of the table that exports the series `series`.
pub(super) fn metric_of(series: &str) -> &'static Metric {
    let name = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| series.strip_suffix(suffix));
    let is_it = |metric: &&&Metric| metric.name == series || Some(metric.name) == name;
    TABLE.iter().find(is_it).unwrap_or_else(|| panic!("no metric of the table is called `{series}`"))
}

/// Line of text in Prometheus's format.
struct Line<'a> {
    name: &'a str,
    labels: Vec<(&'a str, &'a str)>,
    value: f64,
}

fn lines(text: &str) -> Vec<Line<'_>> {
    let lines = text.lines().filter(|line| line.starts_with("idem_"));
    let parsed = lines.map(|line| {
        let (series, value) = line.rsplit_once(' ').expect("a value");
        let (name, labels) = series.trim_end_matches('}').split_once('{').unwrap_or((series, ""));
        let labels = labels.split(',').filter_map(|label| label.split_once('='));
        let labels = labels.map(|(label, value)| (label, value.trim_matches('"'))).collect();
        Line { name, labels, value: value.parse().expect("a number") }
    });
    parsed.collect()
}

fn matches(line: &Line<'_>, (label, operator, value): &(String, String, String)) -> bool {
    let own = line.labels.iter().find(|(name, _)| name == label).map_or("", |(_, own)| own);
    match operator.as_str() {
        "=" => own == value,
        "!=" => own != value,
        "=~" => value.split('|').any(|value| value == own),
        other => panic!("the operator `{other}`"),
    }
}

/// Problems of an expression: series that are not exported or never counted, and labels that a series lacks.
fn problems(expr: &str, exported: &[Line<'_>]) -> Vec<String> {
    let mut problems = Vec::new();
    for Selector { name, matchers } in selectors(expr) {
        let metric = metric_of(&name);
        // The table must list each label, and the exporter must have written each value.
        for (label, operator, values) in &matchers {
            if label == "le" && name.ends_with("_bucket") {
                if !metric.buckets().iter().any(|bound| bound.to_string() == *values) {
                    problems.push(format!("`{name}` has no bucket up to {values}"));
                }
                continue;
            }
            let Some(label) = metric.labels.iter().find(|it| it.name == label) else {
                problems.push(format!("`{name}` has no label `{label}`"));
                continue;
            };
            for value in values.split('|') {
                let is_known = label.values.contains(&value);
                let each = (label.name.to_owned(), operator.replace('~', ""), value.to_owned());
                let counted = exported.iter().filter(|line| line.name == name && matches(line, &each));
                if !is_known || counted.map(|line| line.value).sum::<f64>() == 0.0 {
                    problems.push(format!("nothing was counted in `{name}` with {}{operator}{value}", label.name));
                }
            }
        }
        let selected = exported.iter().filter(|line| line.name == name);
        let selected = selected.filter(|line| matchers.iter().all(|matcher| matches(line, matcher)));
        // A counter must have counted; a gauge may be zero again.
        if selected.map(|line| line.value).sum::<f64>() == 0.0 && metric.kind != Kind::Gauge {
            problems.push(format!("nothing was counted in `{name}` with {matchers:?}"));
        }
        for by in expr.split("by (").skip(1) {
            let (labels, _) = by.split_once(')').expect("an end");
            for label in labels.split(", ").filter(|label| *label != "le" || !name.ends_with("_bucket")) {
                if !metric.labels.iter().any(|it| it.name == label) {
                    problems.push(format!("`{name}` has no label `{label}`"));
                }
            }
        }
    }
    problems
}

#[test]
fn every_expression_names_series_that_a_real_run_exports() {
    let mut builder = PrometheusBuilder::new();
    for metric in TABLE.iter().filter(|metric| !metric.buckets().is_empty()) {
        builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), &metric.buckets()).unwrap();
    }
    let recorder = builder.install_recorder().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        for scenario in SCENARIOS {
            (scenario.run)(&World::new()).await;
        }
        // The broker of this call is away, so that the metrics of deliveries count something.
        let world = World::new();
        let call =
            observe(world.lasting(POLICY, LEASE)).on_beat(LEASE / 3, |_| std::future::ready(Err::<(), _>("away")));
        world.driving(call).await.0.unwrap();
        settle().await;
        world.store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Full));
        world.call(POLICY).await.unwrap_err();
        world.store.count_undecided().await.unwrap();
    });
    let text = recorder.render();
    let exported = lines(&text);
    let dashboard = dashboard();
    assert!(serde_json::from_str::<Value>(&dashboard).unwrap()["panels"].as_array().unwrap().len() > 15);
    let panels = ROWS.iter().flat_map(|row| row.panels.iter().map(|panel| panel.expr));
    for expr in ALERTS.iter().map(|alert| alert.expr).chain(panels) {
        assert_eq!(problems(expr, &exported), [""; 0], "{expr}");
    }
    // The exporter writes exactly the metrics of the table, with their meanings.
    let names: BTreeSet<_> = exported.iter().map(|line| metric_of(line.name).name).collect();
    assert_eq!(names, TABLE.iter().map(|metric| metric.name).collect());
    for metric in TABLE {
        assert!(text.contains(&format!("# HELP {} {}", metric.name, metric.help)), "{}", metric.name);
    }
    // The check reports expressions that are wrong.
    for wrong in
        [r#"idem_calls_total{outcome="execute"}"#, r#"idem_calls_total{kind="x"}"#, "sum by (store) (idem_calls_total)"]
    {
        assert!(!problems(wrong, &exported).is_empty(), "{wrong}");
    }
}

#[tokio::test]
async fn the_librarys_own_prometheus_text_has_the_series_of_the_exporter() {
    let world = World::new();
    for _ in 0..2 {
        Operation::new(&world.store, Key::new(SCOPE, "order:42"), POLICY)
            .run(async { idem_runtime::current()?.step("ship").run(async |_| Ok::<_, idem_runtime::Error>(7)).await })
            .await
            .unwrap();
    }
    world.store.count_undecided().await.unwrap();
    let text = world.metrics().prometheus_text();
    for line in [
        "# TYPE idem_calls_total counter",
        "idem_calls_total{scope=\"ship\",outcome=\"executed\"} 1",
        "idem_calls_total{scope=\"ship\",outcome=\"replayed\"} 1",
        "idem_calls_total{scope=\"ship\",outcome=\"unrecorded\"} 0",
        "idem_attempts_bucket{scope=\"ship\",le=\"1\"} 1",
        "idem_attempts_bucket{scope=\"ship\",le=\"+Inf\"} 1",
        "idem_attempts_count{scope=\"ship\"} 1",
        "idem_steps_total{scope=\"ship\",outcome=\"ran\"} 1",
        "idem_store_seconds_count{store=\"memory\",op=\"reserve\"} 2",
        "idem_store_errors_total{store=\"memory\",op=\"finish\",kind=\"full\"} 0",
        "idem_leases_held{store=\"memory\"} 0",
        "idem_keys_waiting_for_decision{store=\"memory\"} 0",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}\n{text}");
    }
    let names: BTreeSet<_> = lines(&text).iter().map(|line| metric_of(line.name).name).collect();
    assert_eq!(names, TABLE.iter().map(|metric| metric.name).collect());
}
