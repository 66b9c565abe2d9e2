//! Stub of the facade for a build without the feature `metrics`. This stub does nothing.
#![allow(clippy::unused_self, reason = "the methods have the signatures of the facade")]

use super::table::Metric;

macro_rules! handles {
    ($($name:ident)+) => { $(
        pub(super) struct $name;

        impl $name {
            pub(super) fn new(_: &'static Metric, _: impl FnOnce() -> Vec<(&'static str, String)>) -> Self {
                Self
            }
        }
    )+ };
}

handles! { Counter Gauge Histogram }

impl Counter {
    pub(super) fn add(&self, _: u64) {}
}

impl Gauge {
    pub(super) fn up(&self) {}

    pub(super) fn down(&self) {}

    pub(super) fn set(&self, _: f64) {}
}

impl Histogram {
    pub(super) fn add(&self, _: impl FnOnce() -> f64) {}
}

pub(super) fn describe() {}
