//! The numbers at one moment, for programs that export or check them.

use std::fmt::{self, Write as _};

use super::table::{Kind, Metric};

/// All numbers of one store handle and its clones at one moment; [`StoreExt::metrics`](crate::StoreExt::metrics)
/// returns it.
///
/// Counters start with the handle, and only grow. They are read one after the other while calls go on, so two counters
/// may differ by the events in between.
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

/// One line of a [`Snapshot`]: a metric, its labels and its value.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Series {
    /// The metric.
    pub metric: &'static Metric,
    /// The names and values of the labels.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: Value,
}

/// The value of a [`Series`].
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

/// The values of a histogram.
#[derive(Clone, PartialEq, Debug, Default)]
#[non_exhaustive]
pub struct Distribution {
    /// The upper bounds of the buckets, in the unit of the metric.
    pub bounds: Vec<f64>,
    /// The number of values in each bucket and in no lower bucket; the last bucket is above all bounds.
    pub counts: Vec<u64>,
    /// The sum of all values, in the unit of the metric.
    pub sum: f64,
}

impl Distribution {
    /// Returns the number of all values.
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
    /// Returns all series, including those without any event.
    pub fn series(&self) -> &[Series] {
        &self.series
    }

    /// Keeps the numbers of the handler with this scope; `_other` has the sum of all scopes beyond the first 200.
    #[must_use]
    pub fn scope(mut self, scope: &str) -> Self {
        self.series.retain(|series| series.has(&[("scope", scope)]));
        self
    }

    /// Returns the sum of the series of `metric` with these labels: the count of a counter, the level of a gauge, or
    /// the number of values in a histogram.
    pub fn count(&self, metric: &Metric, labels: &[(&str, &str)]) -> u64 {
        let of = self.series.iter().filter(|it| it.metric.name == metric.name && it.has(labels));
        let counts = of.map(|it| match &it.value {
            Value::Count(count) | Value::Level(count) => *count,
            Value::Distribution(values) => values.count(),
        });
        counts.sum()
    }

    /// Returns the text that Prometheus reads (version 0.0.4), for a route `/metrics` without another crate.
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
            // Writing to a `String` never fails.
            let _ = write!(text, "{it}");
        }
        text
    }
}

/// Writes the series in the form of Prometheus, a line for each number.
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
