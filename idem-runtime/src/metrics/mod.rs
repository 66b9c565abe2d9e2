//! Metrics about calls, leases and stores: a table of all metrics, and a snapshot of each store handle. The feature
//! `metrics` also exports all metrics through the facade `metrics`.
//!
//! [`StoreExt::metrics`](crate::StoreExt::metrics) returns a [`Snapshot`]. [`TABLE`] lists every metric with its labels
//! and meaning; no label is ever a key. Scopes beyond the first 200 of a store handle are counted together as `_other`.
//! An event costs one addition, or two if the metric has a sum. The first call of a scope allocates its counters.
//!
//! With the feature `metrics`, install the recorder of your exporter before the first call: earlier events are only in
//! snapshots. Histograms have the buckets of [`Metric::buckets`]; set these buckets in your exporter:
//!
//! ```text
//! let mut builder = metrics_exporter_prometheus::PrometheusBuilder::new();
//! for metric in idem_runtime::metrics::TABLE.iter().filter(|metric| !metric.buckets().is_empty()) {
//!     builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.to_owned()), &metric.buckets())?;
//! }
//! builder.install()?;
//! ```

mod cells;
#[cfg_attr(not(feature = "metrics"), path = "unexported.rs")]
mod facade;
mod scopes;
mod snapshot;
mod table;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use self::cells::{CountedGauge, Counters, Gauge, Histograms};
pub(crate) use self::scopes::ScopeCells;
use self::scopes::Scopes;
pub use self::snapshot::{Distribution, Series, Snapshot, Value};
pub use self::table::*;
use crate::clock::{Clock, as_nanos};
use crate::sync::SharedList;

static TRANSACTIONS: SharedList<Arc<Metrics>> = SharedList::new();

/// Returns the metrics of calls inside of your own transactions (`PostgresStore::within`, `SqliteStore::within`), for
/// the whole process: the store handle of such a call ends with the call, so it can't hold metrics. The metrics are
/// kept by driver (label `store`) and by scope; a scope has one series for each driver that it uses.
pub fn in_transactions() -> Snapshot {
    // The number of leases is 0: in a transaction, locks of the database hold the key, and no lease is renewed.
    Snapshot { series: TRANSACTIONS.iter().flat_map(|metrics| metrics.snapshot(0).series).collect() }
}

/// Metrics of one store handle and its clones.
pub(crate) struct Metrics {
    store: &'static str,
    scopes: Scopes,
    store_seconds: Histograms,
    store_errors: Counters,
    keys_waiting: CountedGauge,
    leases_held: Gauge,
    beats: Counters,
    beat_lag: Histograms,
    broker_beats: Counters,
}

impl Metrics {
    pub(crate) fn new(store: &'static str, clock: Arc<dyn Clock>) -> Self {
        facade::describe();
        Self {
            store,
            scopes: Scopes::new(clock),
            store_seconds: Histograms::new(&STORE_SECONDS, store),
            store_errors: Counters::new(&STORE_ERRORS, store),
            keys_waiting: CountedGauge::new(&KEYS_WAITING),
            leases_held: Gauge::new(&LEASES_HELD, store),
            beats: Counters::new(&BEATS, store),
            beat_lag: Histograms::new(&BEAT_LAG_SECONDS, store),
            broker_beats: Counters::new(&BROKER_BEATS, store),
        }
    }

    /// Returns the metrics of all calls inside of transactions with this driver, in the whole process: each call in a
    /// transaction has its own store handle, which ends with the call.
    pub(crate) fn of_transactions(store: &'static str, clock: &Arc<dyn Clock>) -> Arc<Self> {
        let make = || Arc::new(Self::new(store, Arc::clone(clock)));
        Arc::clone(TRANSACTIONS.find_or_add(|known| known.store == store, make))
    }

    /// Returns the metrics of the handler with this scope.
    pub(crate) fn scope(&self, scope: &str) -> Arc<ScopeCells> {
        self.scopes.get(scope)
    }

    /// Records the duration of a store operation.
    pub(crate) fn store_took(&self, op: StoreOp, took: Duration) {
        self.store_seconds.add(op as usize, as_nanos(took));
    }

    pub(crate) fn store_failed(&self, op: StoreOp, kind: ErrorKind) {
        self.store_errors.add(op as usize * ErrorKind::LABEL.values.len() + kind as usize, 1);
    }

    /// Sets the number of keys that wait for the decision of an operator.
    pub(crate) fn keys_wait(&self, count: u64) {
        self.keys_waiting.set(self.store, count);
    }

    pub(crate) fn lease_begins(&self) {
        self.leases_held.up();
    }

    pub(crate) fn lease_ends(&self) {
        self.leases_held.down();
    }

    pub(crate) fn beat(&self, result: BeatResult) {
        self.beats.add(result as usize, 1);
    }

    pub(crate) fn beat_was_late(&self, by: Duration) {
        self.beat_lag.add(0, as_nanos(by));
    }

    pub(crate) fn broker_beat(&self, result: BrokerBeat) {
        self.broker_beats.add(result as usize, 1);
    }

    /// Returns the current values of all metrics; `leases_held` is the number of leases that are kept alive.
    pub(crate) fn snapshot(&self, leases_held: usize) -> Snapshot {
        let mut series = Vec::new();
        self.scopes.read(&mut series);
        let store = self.store;
        self.store_seconds.read(store, &mut series);
        self.store_errors.read(store, &mut series);
        self.keys_waiting.read(store, &mut series);
        self.leases_held.read(store, leases_held as u64, &mut series);
        self.beats.read(store, &mut series);
        self.beat_lag.read(store, &mut series);
        self.broker_beats.read(store, &mut series);
        Snapshot { series }
    }
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").field("store", &self.store).finish_non_exhaustive()
    }
}
