//! Snapshots of all metrics, for programs that export or check them.

use std::fmt::{self, Write as _};

use super::table::{Kind, Metric};

/// Values of all metrics of one store handle and its clones at one moment.
/// [`StoreExt::metrics`](crate::StoreExt::metrics) returns a snapshot.
///
/// Counters start at zero with the store handle, and only grow. A snapshot reads one counter after the other while
/// calls go on, so the newest events may be in one counter and not yet in another.
///
/// ```
/// # use idem_runtime::{Error, MemoryStore, StoreExt, idempotent};
/// use idem_runtime::metrics;
///
/// #[idempotent(key = "order:{id}", ttl = "7d", store = store, scope = "ship")]
/// async fn ship(store: &MemoryStore, id: u32) -> Result<String, Error> {
///     Ok(format!("parcel for {id}"))
/// }
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = MemoryStore::new();
/// ship(&store, 42).await.unwrap();
/// ship(&store, 42).await.unwrap();
///
/// let seen = store.metrics().scope("ship");
/// assert_eq!(seen.count(&metrics::CALLS, &[("outcome", "executed")]), 1);
/// assert_eq!(seen.count(&metrics::CALLS, &[("outcome", "replayed")]), 1);
/// assert!(seen.prometheus_text().contains("idem_calls_total{scope=\"ship\",outcome=\"replayed\"} 1"));
/// # });
/// ```
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    pub(super) series: Vec<Series>,
}

/// A metric with its labels and its value: one line of a [`Snapshot`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Series {
    /// Metric of the series.
    pub metric: &'static Metric,
    /// Names and values of the labels.
    pub labels: Vec<(&'static str, String)>,
    /// Current value of the series.
    pub value: Value,
}

/// Value of a [`Series`].
#[derive(Clone, PartialEq, Debug)]
#[non_exhaustive]
pub enum Value {
    /// Value of a counter.
    Count(u64),
    /// Value of a gauge.
    Level(u64),
    /// Value of a histogram.
    Distribution(Distribution),
}

/// Content of a histogram.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Distribution {
    /// Upper bounds of the buckets, in the unit of the metric.
    pub bounds: Vec<f64>,
    /// Number of values in each bucket. Each value is counted in one bucket only: the first bucket whose upper bound is
    /// at least the value. The last bucket holds the values above all bounds.
    pub counts: Vec<u64>,
    /// Sum of all values, in the unit of the metric.
    pub sum: f64,
}

impl Distribution {
    /// Returns the number of all values in the histogram.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl Series {
    fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(name, value)| self.labels.iter().any(|(own, is)| own == name && is == value))
    }
}

impl Snapshot {
    /// Returns all series, including series without an event.
    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// Keeps only the series of the handler with this scope. The scope `_other` has the sum of all scopes beyond the
    /// first 200.
    #[must_use]
    pub fn scope(mut self, scope: &str) -> Self {
        self.series.retain(|series| series.has(&[("scope", scope)]));
        self
    }

    /// Returns the sum over the series of `metric` with these labels: of the counts of a counter, the levels of a
    /// gauge, or the numbers of values in a histogram.
    pub fn count(&self, metric: &Metric, labels: &[(&str, &str)]) -> u64 {
        let of = self.series.iter().filter(|it| it.metric.name == metric.name && it.has(labels));
        let counts = of.map(|it| match &it.value {
            Value::Count(count) | Value::Level(count) => *count,
            Value::Distribution(values) => values.count(),
        });
        counts.sum()
    }

    /// Returns the metrics in the text format of Prometheus (version 0.0.4). A program can serve this text on a route
    /// `/metrics` without another crate.
    pub fn prometheus_text(&self) -> String {
        let mut text = String::new();
        let mut described = "";
        let mut series: Vec<_> = self.series.iter().collect();
        series.sort_by_key(|it| it.metric.name);
        for it in series {
            if described != it.metric.name {
                described = it.metric.name;
                let kind = match it.metric.kind {
                    Kind::Counter => "counter",
                    Kind::Gauge => "gauge",
                    Kind::Histogram { .. } => "histogram",
                };
                let _ = writeln!(text, "# HELP {described} {}\n# TYPE {described} {kind}", it.metric.help);
            }
            // The result is ignored, because writing to a `String` never fails.
            let _ = write!(text, "{it}");
        }
        text
    }
}

/// Writes the series in the text format of Prometheus, with a line for each number.
impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.metric.name;
        let labels = |f: &mut fmt::Formatter<'_>, bound: Option<&str>| {
            let own = self.labels.iter().map(|(name, value)| (*name, value.as_str()));
            for (at, (name, value)) in own.chain(bound.map(|bound| ("le", bound))).enumerate() {
                let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                write!(f, "{}{name}=\"{value}\"", if at == 0 { "{" } else { "," })?;
            }
            f.write_str("}")
        };
        match &self.value {
            Value::Count(count) | Value::Level(count) => {
                f.write_str(name)?;
                labels(f, None)?;
                writeln!(f, " {count}")
            }
            Value::Distribution(values) => {
                let mut below = 0;
                for (at, count) in values.counts.iter().enumerate() {
                    below += count;
                    let bound = values.bounds.get(at).map_or_else(|| "+Inf".to_owned(), f64::to_string);
                    write!(f, "{name}_bucket")?;
                    labels(f, Some(&bound))?;
                    writeln!(f, " {below}")?;
                }
                for (suffix, value) in [("sum", values.sum.to_string()), ("count", below.to_string())] {
                    write!(f, "{name}_{suffix}")?;
                    labels(f, None)?;
                    writeln!(f, " {value}")?;
                }
                Ok(())
            }
        }
    }
}
