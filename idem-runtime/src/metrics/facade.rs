//! Export of all metrics through the facade `metrics`, for any exporter that the program has.
//!
//! Handles of the facade are made once for each scope and store, so that an event costs no look-up and no allocation. A
//! handle reports to the recorder that is installed when the handle is made: install the recorder before the first
//! call.

use ::metrics::{Key, Level, Metadata, with_recorder};

use super::table::{self, Kind, Metric};

const METADATA: Metadata<'_> = Metadata::new("idem_runtime", Level::INFO, None);

fn key(metric: &'static Metric, labels: Vec<(&'static str, String)>) -> Key {
    let labels = labels.into_iter().map(|(name, value)| ::metrics::Label::new(name, value));
    Key::from_parts(metric.name, labels.collect::<Vec<_>>())
}

macro_rules! handles {
    ($($name:ident: $register:ident;)+) => { $(
        pub(super) struct $name(::metrics::$name);

        impl $name {
            pub(super) fn new(metric: &'static Metric, labels: impl FnOnce() -> Vec<(&'static str, String)>) -> Self {
                Self(with_recorder(|recorder| recorder.$register(&key(metric, labels()), &METADATA)))
            }
        }
    )+ };
}

handles! {
    Counter: register_counter;
    Gauge: register_gauge;
    Histogram: register_histogram;
}

impl Counter {
    pub(super) fn add(&self, count: u64) {
        self.0.increment(count);
    }
}

impl Gauge {
    pub(super) fn up(&self) {
        self.0.increment(1.0);
    }

    pub(super) fn down(&self) {
        self.0.decrement(1.0);
    }

    pub(super) fn set(&self, level: f64) {
        self.0.set(level);
    }
}

impl Histogram {
    pub(super) fn add(&self, value: impl FnOnce() -> f64) {
        self.0.record(value());
    }
}

/// Passes the help text of each metric to the exporter.
pub(super) fn describe() {
    with_recorder(|recorder| {
        for metric in table::TABLE {
            let unit = match metric.unit {
                table::Unit::Count => Some(::metrics::Unit::Count),
                table::Unit::Seconds => Some(::metrics::Unit::Seconds),
                table::Unit::Bytes => Some(::metrics::Unit::Bytes),
                table::Unit::Ratio => None,
            };
            let (name, help) = (metric.name.into(), metric.help.into());
            match metric.kind {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram { .. } => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}
