//! Counters, histograms and gauges to which many threads add.

use std::sync::atomic::{AtomicU64, Ordering};

use super::facade;
use super::snapshot::{Distribution, Series, Value};
use super::table::{Kind, Metric};
use crate::sync::SharedOnce;

/// Value of a metric's first label: the name of a scope or a store. The values of this label are no closed set.
type OpenLabel<'a> = &'a str;

/// Counters of one metric, one for each combination of its closed labels.
pub(crate) struct Counters {
    metric: &'static Metric,
    cells: Box<[Counter]>,
}

struct Counter {
    count: AtomicU64,
    exported: facade::Counter,
}

impl Counters {
    pub(crate) fn new(metric: &'static Metric, open: OpenLabel<'_>) -> Self {
        let cell = |at| Counter {
            count: AtomicU64::new(0),
            exported: facade::Counter::new(metric, || labels(metric, open, at)),
        };
        Self { metric, cells: (0..combinations(metric)).map(cell).collect() }
    }

    /// Adds `count` to the counter with the index `at`: the index of the closed label's value. For several closed
    /// labels, `at` is the index of the combination of their values, in the order of the table.
    pub(crate) fn add(&self, at: usize, count: u64) {
        if let Some(cell) = self.cells.get(at) {
            cell.count.fetch_add(count, Ordering::Relaxed);
            cell.exported.add(count);
        }
    }

    pub(super) fn read(&self, open: OpenLabel<'_>, series: &mut Vec<Series>) {
        for (at, cell) in self.cells.iter().enumerate() {
            let value = Value::Count(cell.count.load(Ordering::Relaxed));
            series.push(Series { metric: self.metric, labels: labels(self.metric, open, at), value });
        }
    }
}

/// Histograms of one metric, one for each combination of its closed labels.
pub(crate) struct Histograms {
    metric: &'static Metric,
    bounds: &'static [u64],
    cells: Box<[Histogram]>,
}

struct Histogram {
    /// One bucket for each bound, plus one bucket for values above all bounds.
    counts: Box<[AtomicU64]>,
    /// Sum of all values in parts of the unit: nanoseconds for seconds, millionths for ratios.
    sum: AtomicU64,
    exported: facade::Histogram,
}

impl Histograms {
    pub(crate) fn new(metric: &'static Metric, open: OpenLabel<'_>) -> Self {
        let bounds = match metric.kind {
            Kind::Histogram { bounds } => bounds,
            _ => &[],
        };
        let cell = |at| Histogram {
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
            exported: facade::Histogram::new(metric, || labels(metric, open, at)),
        };
        Self { metric, bounds, cells: (0..combinations(metric)).map(cell).collect() }
    }

    /// Adds a value, in parts of the unit, to the histogram with the index `at`.
    pub(crate) fn add(&self, at: usize, parts: u64) {
        // A shortcut for zero: most operations of a store in memory take no measurable time.
        let bucket = if parts == 0 { 0 } else { self.bounds.partition_point(|bound| *bound < parts) };
        if let Some(cell) = self.cells.get(at)
            && let Some(count) = cell.counts.get(bucket)
        {
            count.fetch_add(1, Ordering::Relaxed);
            if parts != 0 {
                cell.sum.fetch_add(parts, Ordering::Relaxed);
            }
            cell.exported.add(|| self.metric.whole(parts));
        }
    }

    pub(super) fn read(&self, open: OpenLabel<'_>, series: &mut Vec<Series>) {
        for (at, cell) in self.cells.iter().enumerate() {
            let counts = cell.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
            let sum = self.metric.whole(cell.sum.load(Ordering::Relaxed));
            let value = Value::Distribution(Distribution { bounds: self.metric.buckets(), counts, sum });
            series.push(Series { metric: self.metric, labels: labels(self.metric, open, at), value });
        }
    }
}

/// A number that goes up and down. Only the exporter stores the number: a snapshot gets the current value from
/// its caller.
pub(crate) struct Gauge {
    metric: &'static Metric,
    exported: facade::Gauge,
}

impl Gauge {
    pub(crate) fn new(metric: &'static Metric, open: OpenLabel<'_>) -> Self {
        Self { metric, exported: facade::Gauge::new(metric, || labels(metric, open, 0)) }
    }

    pub(crate) fn up(&self) {
        self.exported.up();
    }

    pub(crate) fn down(&self) {
        self.exported.down();
    }

    pub(super) fn read(&self, open: OpenLabel<'_>, level: u64, series: &mut Vec<Series>) {
        let labels = labels(self.metric, open, 0);
        series.push(Series { metric: self.metric, labels, value: Value::Level(level) });
    }
}

/// A number that the program counts from time to time. The number has no series before the first count, because a zero
/// would claim that there are no records.
pub(crate) struct CountedGauge {
    metric: &'static Metric,
    counted: SharedOnce<(AtomicU64, facade::Gauge)>,
}

impl CountedGauge {
    pub(crate) fn new(metric: &'static Metric) -> Self {
        Self { metric, counted: SharedOnce::new() }
    }

    pub(crate) fn set(&self, open: OpenLabel<'_>, level: u64) {
        let first = || (AtomicU64::new(level), facade::Gauge::new(self.metric, || labels(self.metric, open, 0)));
        let (last, exported) = self.counted.get_or_init(first);
        last.store(level, Ordering::Relaxed);
        exported.set(self.metric.whole(level));
    }

    pub(super) fn read(&self, open: OpenLabel<'_>, series: &mut Vec<Series>) {
        if let Some((last, _)) = self.counted.get() {
            let value = Value::Level(last.load(Ordering::Relaxed));
            series.push(Series { metric: self.metric, labels: labels(self.metric, open, 0), value });
        }
    }
}

/// Returns the number of combinations of the closed labels.
fn combinations(metric: &Metric) -> usize {
    metric.labels.iter().skip(1).map(|label| label.values.len()).product()
}

/// Returns the labels of the combination with the index `at`. The value of the last label changes fastest.
fn labels(metric: &'static Metric, open: OpenLabel<'_>, at: usize) -> Vec<(&'static str, String)> {
    let (mut rest, mut labels) = (at, Vec::with_capacity(metric.labels.len()));
    for label in metric.labels.iter().rev() {
        let value = match label.values.len() {
            0 => open,
            count => {
                let value = label.values[rest % count];
                rest /= count;
                value
            }
        };
        labels.push((label.name, value.to_owned()));
    }
    labels.reverse();
    labels
}
