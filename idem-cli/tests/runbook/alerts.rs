//! Evaluates alerts and panels with two snapshots of a store's exported metrics.
//!
//! No Prometheus is needed, because the rules only compare increases of counters with a number or with each other.

use serde_json::Value;

const RULES: &str = include_str!("../../../ops/alerts.yaml");
const DASHBOARD: &str = include_str!("../../../ops/grafana.json");

/// Returns the expression of a rule.
fn rule(name: &str) -> String {
    let (_, rest) =
        RULES.split_once(&format!("- alert: {name}\n")).unwrap_or_else(|| panic!("there is no alert `{name}`"));
    let expr = rest.lines().find_map(|line| line.trim().strip_prefix("expr: ")).expect("an expression");
    expr.trim_matches('\'').replace("''", "'")
}

/// Returns the expression of a panel, named by its row and its title.
fn panel(name: &str) -> String {
    let (row, title) = name.split_once(": ").unwrap_or_else(|| panic!("`{name}` names no row and panel"));
    let dashboard: Value = serde_json::from_str(DASHBOARD).expect("JSON");
    let mut inside = "";
    for panel in dashboard["panels"].as_array().expect("panels") {
        match (panel["type"].as_str(), panel["title"].as_str().expect("a title")) {
            (Some("row"), name) => inside = name,
            (_, name) if inside == row && name == title => {
                return panel["targets"][0]["expr"].as_str().expect("an expression").to_owned();
            }
            _ => {}
        }
    }
    panic!("the dashboard has no panel `{name}`");
}

/// A series: its name, its labels, and its increase.
type Series<'a> = (&'a str, Vec<(&'a str, &'a str)>, f64);

fn series(line: &str) -> Option<Series<'_>> {
    let (series, value) = line.rsplit_once(' ').filter(|_| line.starts_with("idem_"))?;
    let (name, labels) = series.trim_end_matches('}').split_once('{').unwrap_or((series, ""));
    let labels = labels.split(',').filter_map(|label| label.split_once('='));
    Some((name, labels.map(|(label, value)| (label, value.trim_matches('"'))).collect(), value.parse().ok()?))
}

/// The exported metrics of a store, before and after an incident.
pub(crate) struct Looks {
    pub(crate) before: String,
    pub(crate) after: String,
}

impl Looks {
    /// Returns the increase of each series that the first selector of `expr` selects; for a gauge, its value.
    ///
    /// As in Prometheus, `increase` returns nothing for a series that did not exist before. An expression with `unless`
    /// adds the whole value of such a series.
    fn grown(&self, expr: &str) -> Vec<Series<'_>> {
        let sees_new_series = !expr.contains("increase(") || expr.contains(" unless ");
        let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let from = &expr[expr.find("idem_").expect("a metric")..];
        let (wanted, rest) = from.split_at(from.find(|c| !is_word(c)).unwrap_or(from.len()));
        let matchers =
            rest.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(matchers, _)| matchers);
        let matchers: Vec<_> = matchers.split(',').filter(|it| !it.is_empty() && !it.contains('$')).collect();
        let fits = |labels: &[(&str, &str)], matcher: &str| {
            let (label, rest) = matcher.split_at(matcher.find(|c| !is_word(c)).expect("an operator"));
            let (operator, value) = rest.split_once('"').expect("a value");
            let own = labels.iter().find(|(name, _)| *name == label).map_or("", |(_, own)| own);
            let is_one = value.trim_end_matches('"').split('|').any(|value| value == own);
            is_one == (operator != "!=")
        };
        let gauge = self.after.contains(&format!("# TYPE {wanted} gauge"));
        let mut grown = Vec::new();
        for (name, labels, value) in self.after.lines().filter_map(series) {
            if name != wanted || !matchers.iter().all(|matcher| fits(&labels, matcher)) {
                continue;
            }
            let earlier = self.before.lines().filter_map(series).find(|it| it.0 == name && it.1 == labels);
            let earlier = earlier.filter(|_| !gauge).map(|it| it.2);
            let earlier = earlier.unwrap_or(if gauge || sees_new_series { 0.0 } else { value });
            grown.push((name, labels, value - earlier));
        }
        grown
    }

    fn sum(&self, expr: &str) -> f64 {
        self.grown(expr).iter().map(|it| it.2).sum()
    }

    /// Returns the quantile of a histogram as Prometheus computes it: by linear interpolation in the bucket.
    fn quantile(&self, part: f64, expr: &str) -> f64 {
        let mut buckets: Vec<(f64, f64)> = Vec::new();
        for (_, labels, count) in self.grown(expr) {
            let bound = labels.iter().find(|(name, _)| *name == "le").expect("a bucket").1;
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a bound") };
            match buckets.iter_mut().find(|it| it.0.total_cmp(&bound).is_eq()) {
                Some(bucket) => bucket.1 += count,
                None => buckets.push((bound, count)),
            }
        }
        buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
        let rank = part * buckets.last().map_or(0.0, |it| it.1);
        let (mut bound, mut count) = (0.0, 0.0);
        for (end, all) in buckets {
            if all >= rank && all > 0.0 {
                return if end.is_infinite() { bound } else { bound + (end - bound) * (rank - count) / (all - count) };
            }
            (bound, count) = (end, all);
        }
        f64::NAN
    }

    /// Returns whether the alert fires.
    pub(crate) fn fires(&self, alert: &str) -> bool {
        let expr = rule(alert);
        let (left, right) = expr.rsplit_once(" > ").unwrap_or_else(|| panic!("{alert}: `{expr}` compares nothing"));
        let value = match left.strip_prefix("histogram_quantile(") {
            Some(rest) => {
                let (part, rest) = rest.split_once(", ").expect("a part");
                self.quantile(part.parse().expect("a number"), rest)
            }
            None => {
                let mut terms = left.split(" - ").map(|term| self.sum(term));
                let first = terms.next().expect("a term");
                terms.fold(first, |rest, term| rest - term)
            }
        };
        let limit = match right.split_once(" * ") {
            Some((factor, other)) => factor.parse::<f64>().expect("a number") * self.sum(other),
            None => right.parse().unwrap_or_else(|_| panic!("{alert}: `{right}` is no number")),
        };
        value > limit
    }

    /// Returns the labels of the series in a panel that have increased.
    pub(crate) fn shown(&self, name: &str) -> Vec<&str> {
        let grown = self.grown(&panel(name)).into_iter().filter(|it| it.2 > 0.0);
        grown.flat_map(|it| it.1.into_iter().map(|(_, value)| value)).collect()
    }
}
