//! Table of all metrics of the library: name, unit, labels, buckets and meaning. The exported metrics,
//! `docs/metrics.md`, the dashboard and the alerts are made from this table.

use std::fmt;

/// A metric: its name, its meaning, and its labels.
#[derive(Debug)]
#[non_exhaustive]
pub struct Metric {
    /// Name of the metric in the form of Prometheus.
    pub name: &'static str,
    /// Kind of the metric.
    pub kind: Kind,
    /// Unit of the metric's values.
    pub unit: Unit,
    /// Labels of the metric. The first label is open: its value is a scope or a store. The values of all other labels
    /// are closed sets.
    pub labels: &'static [Label],
    /// Meaning of the metric, in one sentence.
    pub help: &'static str,
}

/// Kind of a [`Metric`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// A number that only grows.
    Counter,
    /// A number that goes up and down.
    Gauge,
    /// Number of values in each bucket, and the sum of all values.
    #[non_exhaustive]
    Histogram {
        /// Upper bounds of the buckets in parts of the unit: nanoseconds for seconds, millionths for ratios.
        /// [`Metric::buckets`] returns the bounds in whole units.
        bounds: &'static [u64],
    },
}

/// Unit of a [`Metric`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unit {
    /// A plain number.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Ratio: 1 is the whole.
    Ratio,
}

impl Unit {
    /// Returns the number of parts in one unit. Histograms add whole numbers of parts.
    pub(super) const fn parts(self) -> u64 {
        match self {
            Self::Count | Self::Bytes => 1,
            Self::Seconds => 1_000_000_000,
            Self::Ratio => 1_000_000,
        }
    }

    /// Converts an amount in units to parts.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "it saturates"
    )]
    pub(super) fn of(self, units: f64) -> u64 {
        (units * self.parts() as f64) as u64
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Count => "count",
            Self::Seconds => "seconds",
            Self::Bytes => "bytes",
            Self::Ratio => "ratio",
        })
    }
}

/// A label of a [`Metric`]. No label ever holds a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Label {
    /// Name of the label.
    pub name: &'static str,
    /// All values that the label can have; empty for the name of a scope or a store.
    pub values: &'static [&'static str],
}

const SCOPE: Label = Label { name: "scope", values: &[] };
const STORE: Label = Label { name: "store", values: &[] };

impl Metric {
    /// Returns the upper bounds of a histogram in its unit, except the last bound, which is infinite. Returns an empty
    /// list for other kinds of metrics.
    ///
    /// Set these bounds in an exporter of the facade `metrics`; see `docs/metrics.md`.
    pub fn buckets(&self) -> Vec<f64> {
        match self.kind {
            Kind::Histogram { bounds } => bounds.iter().map(|bound| self.whole(*bound)).collect(),
            _ => Vec::new(),
        }
    }

    /// Converts an amount in parts to units.
    #[allow(clippy::cast_precision_loss, reason = "the value is only shown to people")]
    pub(super) fn whole(&self, parts: u64) -> f64 {
        parts as f64 / self.unit.parts() as f64
    }
}

/// Defines a closed set of label values.
macro_rules! labels {
    ($(#[$about:meta])* $name:ident, $label:literal { $($(#[$what:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum $name { $($(#[$what])* $variant,)+ }

        impl $name {
            /// Label with all its values.
            pub const LABEL: Label = Label { name: $label, values: &[$($text),+] };

            /// Returns the text of the value.
            pub const fn name(self) -> &'static str {
                Self::LABEL.values[self as usize]
            }
        }
    };
}

labels! {
    /// Outcome of a call, as a label. Every call has exactly one outcome.
    CallOutcome, "outcome" {
        /// The body ran, and its result is recorded.
        Executed = "executed",
        /// The body ran and returned an error, which freed the key or was recorded.
        Failed = "failed",
        /// A recorded result was returned, without a wait.
        Replayed = "replayed",
        /// A recorded result was returned after a wait for the attempt that made it.
        WaitedReplayed = "waited_replayed",
        /// The call was refused, because another attempt was running.
        InProgress = "in_progress",
        /// The call was refused, because the key was used with another payload.
        FingerprintMismatch = "fingerprint_mismatch",
        /// The call was refused: the effect of an earlier run is in doubt, and an operator has to decide.
        Interrupted = "interrupted",
        /// The reconciler supplied the result of an earlier run whose effect was in doubt.
        Reconciled = "reconciled",
        /// The reconciler was asked about an earlier run, and did not know whether its effect has happened.
        Unresolved = "unresolved",
        /// The call was refused, because the number of started attempts had reached `max_attempts`.
        AttemptsExhausted = "attempts_exhausted",
        /// The call was refused, because its key was missing.
        MissingKey = "missing_key",
        /// The call was refused, because its key, fingerprint or policy was not valid.
        Invalid = "invalid",
        /// The operation had finished, and its result can't be replayed.
        ResultUnavailable = "result_unavailable",
        /// The store failed, and the body did not run.
        StoreError = "store_error",
        /// The lease was lost while the body ran: another attempt took over, or the record was removed.
        LeaseLost = "lease_lost",
        /// The body ran for longer than its `timeout`.
        TimedOut = "timed_out",
        /// The body ran, and its result could not be recorded.
        Unrecorded = "unrecorded",
        /// The operation has finished, and its messages are not all marked as sent.
        Unsent = "unsent",
        /// The call was dropped before it returned.
        Cancelled = "cancelled",
        /// The body panicked.
        Panicked = "panicked",
        /// The body ran without a reservation: the store did not answer, or the key was missing.
        Unprotected = "unprotected",
        /// Shadow mode: the body ran, although the library would have suppressed the call.
        Suppressed = "suppressed",
        /// Mode `off`: the body ran without a call of the store.
        Off = "off",
    }
}

labels! {
    /// Disposition of the message of a call, as a label.
    DispositionLabel, "disposition" {
        /// The message is to be acknowledged.
        Ack = "ack",
        /// The message is to be delivered again.
        Retry = "retry",
        /// The message is to be set aside.
        DeadLetter = "dead_letter",
    }
}

labels! {
    /// Reason why an effect is uncertain, as a label; see [`Doubt`](crate::policy::Doubt).
    DoubtLabel, "kind" {
        /// The lease was lost while the body ran: another attempt took over, or the record was removed.
        LeaseLost = "lease_lost",
        /// The body ran, and its result could not be recorded.
        Unrecorded = "unrecorded",
        /// The body ran for longer than its `timeout`.
        TimedOut = "timed_out",
        /// The call was dropped while its body ran.
        Cancelled = "cancelled",
        /// The body panicked.
        Panicked = "panicked",
        /// An earlier run had been interrupted, and its effect is unknown.
        Interrupted = "interrupted",
        /// The body returned an error that is uncertain.
        Reported = "reported",
    }
}

labels! {
    /// Reason why a completion is recorded without its result, as a label.
    Dropped, "why" {
        /// The result was larger than the policy or the store allows.
        TooLarge = "too_large",
        /// The codec could not write the result.
        Unencodable = "unencodable",
    }
}

labels! {
    /// Problem that shadow mode found with the keys of a handler, as a label.
    KeyQuality, "kind" {
        /// One key came with several payloads: different operations share the key.
        TooCoarse = "too_coarse",
        /// One payload came under several keys: a duplicate may have another key than the first delivery.
        TooFine = "too_fine",
    }
}

labels! {
    /// Operation of a store, as a label.
    StoreOp, "op" {
        /// [`Store::reserve`](crate::Store::reserve).
        Reserve = "reserve",
        /// [`Store::begin`](crate::Store::begin).
        Begin = "begin",
        /// [`Store::renew`](crate::Store::renew).
        Renew = "renew",
        /// [`Store::append`](crate::Store::append).
        Append = "append",
        /// [`Store::finish`](crate::Store::finish).
        Finish = "finish",
        /// [`Store::release`](crate::Store::release).
        Release = "release",
        /// [`Store::wait`](crate::Store::wait).
        Wait = "wait",
        /// [`Store::inspect`](crate::Store::inspect).
        Inspect = "inspect",
        /// [`Store::decide`](crate::Store::decide).
        Decide = "decide",
        /// [`Store::purge`](crate::Store::purge).
        Purge = "purge",
        /// [`Store::list`](crate::Store::list).
        List = "list",
        /// [`Store::ping`](crate::Store::ping).
        Ping = "ping",
    }
}

labels! {
    /// Kind of a [`StoreError`](crate::StoreError), as a label.
    ErrorKind, "kind" {
        /// Nothing was written.
        Unavailable = "unavailable",
        /// The write may have taken effect.
        Unconfirmed = "unconfirmed",
        /// The stored bytes are not a record.
        Corrupt = "corrupt",
        /// Settings, version or rights are wrong.
        Misconfigured = "misconfigured",
        /// The store is full.
        Full = "full",
        /// The result is larger than the store can hold.
        TooLarge = "too_large",
        /// The store does not support the operation.
        Unsupported = "unsupported",
        /// The user's transaction can't continue.
        Aborted = "aborted",
    }
}

labels! {
    /// Result of the renewal of a lease, as a label.
    BeatResult, "result" {
        /// The lease is renewed.
        Renewed = "renewed",
        /// Another attempt holds the lease, or the record is gone.
        Refused = "refused",
        /// The store failed, and the renewal is repeated.
        Failed = "failed",
    }
}

labels! {
    /// Result of a beat, which extends a message at its broker, as a label.
    BrokerBeat, "result" {
        /// The broker has extended the message.
        Told = "told",
        /// The broker did not extend the message, and the beat is repeated.
        Failed = "failed",
        /// The broker no longer extends the message.
        Lost = "lost",
    }
}

labels! {
    /// Outcome of a step, as a label. Every step of an attempt with a reservation has exactly one outcome.
    StepOutcome, "outcome" {
        /// The body ran, and its value is journaled.
        Ran = "ran",
        /// The journaled value of an earlier attempt was returned.
        Replayed = "replayed",
        /// The reconciler supplied the value of an earlier attempt whose effect was in doubt.
        Reconciled = "reconciled",
        /// The body returned an error, or ran into its time limit, and may run again.
        Failed = "failed",
        /// The effect is in doubt, and the body does not run before the doubt is settled.
        InDoubt = "in_doubt",
        /// The step was refused: it has a wrong name or other inputs, or no value is available.
        Refused = "refused",
        /// The store did not confirm an entry of the journal.
        Unconfirmed = "unconfirmed",
        /// The step was dropped before it ended.
        Dropped = "dropped",
    }
}

const MILLI: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLI;
/// Bounds for durations: from half a millisecond to half an hour.
const TIMES: &[u64] = &[
    MILLI / 2,
    MILLI,
    5 * MILLI / 2,
    5 * MILLI,
    10 * MILLI,
    25 * MILLI,
    50 * MILLI,
    100 * MILLI,
    250 * MILLI,
    500 * MILLI,
    SECOND,
    5 * SECOND / 2,
    5 * SECOND,
    10 * SECOND,
    30 * SECOND,
    60 * SECOND,
    300 * SECOND,
    1800 * SECOND,
];
const PERCENT: u64 = 10_000;
/// Bounds for ratios: from a hundredth to ten times the whole.
const PARTS: &[u64] = &[
    PERCENT,
    5 * PERCENT,
    10 * PERCENT,
    20 * PERCENT,
    33 * PERCENT,
    50 * PERCENT,
    80 * PERCENT,
    100 * PERCENT,
    200 * PERCENT,
    500 * PERCENT,
    1000 * PERCENT,
];
/// Bounds for ratios to `ttl`: from a hundredth of `ttl` to twice `ttl`, in smaller steps near `ttl`.
const PARTS_OF_TTL: &[u64] = &[
    PERCENT,
    5 * PERCENT,
    10 * PERCENT,
    25 * PERCENT,
    50 * PERCENT,
    80 * PERCENT,
    90 * PERCENT,
    100 * PERCENT,
    200 * PERCENT,
];
const HOUR: u64 = 3600 * SECOND;
const DAY: u64 = 24 * HOUR;
/// Bounds for ages of records: from a second to a month.
const AGES: &[u64] = &[
    SECOND,
    10 * SECOND,
    60 * SECOND,
    300 * SECOND,
    1800 * SECOND,
    HOUR,
    3 * HOUR,
    6 * HOUR,
    12 * HOUR,
    DAY,
    2 * DAY,
    4 * DAY,
    7 * DAY,
    14 * DAY,
    30 * DAY,
];
const ATTEMPT_NUMBERS: &[u64] = &[1, 2, 3, 5, 10, 20, 50];
const SIZES: &[u64] = &[64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];

macro_rules! table {
    ($($name:ident: $text:literal, $kind:expr, $unit:ident, [$($label:expr),+], $help:literal;)+) => {
        $(
            #[doc = concat!("`", $text, "`: ", $help)]
            pub static $name: Metric = Metric {
                name: $text, kind: $kind, unit: Unit::$unit, labels: &[$($label),+], help: $help,
            };
        )+

        /// All metrics, in the order of the documentation.
        pub static TABLE: &[&Metric] = &[$(&$name),+];
    };
}

const fn histogram(bounds: &'static [u64]) -> Kind {
    Kind::Histogram { bounds }
}

table! {
    CALLS: "idem_calls_total", Kind::Counter, Count, [SCOPE, CallOutcome::LABEL],
        "Calls that have ended, by outcome.";
    DISPOSITIONS: "idem_dispositions_total", Kind::Counter, Count, [SCOPE, DispositionLabel::LABEL],
        "Calls that have returned, by the disposition of their message.";
    UNCERTAIN: "idem_uncertain_total", Kind::Counter, Count, [SCOPE, DoubtLabel::LABEL],
        "Calls whose effect may have happened although no record shows it.";
    TAKEOVERS: "idem_takeovers_total", Kind::Counter, Count, [SCOPE],
        "Attempts that took over from an attempt whose lease had lapsed.";
    BODY_SECONDS: "idem_body_seconds", histogram(TIMES), Seconds, [SCOPE],
        "Run times of bodies.";
    BODY_LEASE_RATIO: "idem_body_lease_ratio", histogram(PARTS), Ratio, [SCOPE],
        "Run times of bodies, in leases: above 1 a body needs heartbeats.";
    WAIT_SECONDS: "idem_wait_seconds", histogram(TIMES), Seconds, [SCOPE],
        "Waits of duplicates for a running attempt.";
    REPLAY_AGE_SECONDS: "idem_replay_age_seconds", histogram(AGES), Seconds, [SCOPE],
        "Ages of records at their replays, counted from the beginning of their attempts.";
    REPLAY_AGE_RATIO: "idem_replay_age_ratio", histogram(PARTS_OF_TTL), Ratio, [SCOPE],
        "Ages of records at their replays, in parts of `ttl`: near 1 a later duplicate may run again.";
    ATTEMPTS: "idem_attempts", histogram(ATTEMPT_NUMBERS), Count, [SCOPE],
        "Numbers of the attempts that succeeded.";
    RESULT_BYTES: "idem_result_bytes", histogram(SIZES), Bytes, [SCOPE],
        "Sizes of recorded results.";
    RESULTS_DROPPED: "idem_results_dropped_total", Kind::Counter, Count, [SCOPE, Dropped::LABEL],
        "Completions that are recorded without their result, so that duplicates can't replay it.";
    KEY_QUALITY: "idem_key_quality_total", Kind::Counter, Count, [SCOPE, KeyQuality::LABEL],
        "Shadow mode: calls whose key seems to be too coarse or too fine.";
    STEPS: "idem_steps_total", Kind::Counter, Count, [SCOPE, StepOutcome::LABEL],
        "Steps of attempts, by outcome.";
    STORE_SECONDS: "idem_store_seconds", histogram(TIMES), Seconds, [STORE, StoreOp::LABEL],
        "Durations of operations of the store; immediate answers are in the lowest bucket.";
    STORE_ERRORS: "idem_store_errors_total", Kind::Counter, Count, [STORE, StoreOp::LABEL, ErrorKind::LABEL],
        "Failed operations of the store; each try counts.";
    KEYS_WAITING: "idem_keys_waiting_for_decision", Kind::Gauge, Count, [STORE],
        "Keys that wait for the decision of an operator; absent until the program counts them.";
    LEASES_HELD: "idem_leases_held", Kind::Gauge, Count, [STORE],
        "Leases that this process keeps alive.";
    BEATS: "idem_beats_total", Kind::Counter, Count, [STORE, BeatResult::LABEL],
        "Renewals of leases, by result.";
    BEAT_LAG_SECONDS: "idem_beat_lag_seconds", histogram(TIMES), Seconds, [STORE],
        "Delays of renewals of leases after their planned time.";
    BROKER_BEATS: "idem_broker_beats_total", Kind::Counter, Count, [STORE, BrokerBeat::LABEL],
        "Beats of deliveries, which extend a message at its broker, by result.";
}
