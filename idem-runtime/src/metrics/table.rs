//! Every metric of the library: name, unit, labels, buckets and meaning. What is exported, `docs/metrics.md`, the dashboard
//! and the alerts are made from this table.

use std::fmt;

/// One metric: what it is called, what it counts, and by which labels.
#[derive(Debug)]
#[non_exhaustive]
pub struct Metric {
    /// The name, as Prometheus writes it.
    pub name: &'static str,
    /// What kind of number it is.
    pub kind: Kind,
    /// What it is measured in.
    pub unit: Unit,
    /// Its labels. The first one is open: a scope or a store. All others are closed sets.
    pub labels: &'static [Label],
    /// What it means, in one sentence.
    pub help: &'static str,
}

/// What kind of number a [`Metric`] is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// How often values lay within each bound.
    #[non_exhaustive]
    Histogram {
        /// The upper bounds, in parts of the unit; [`Metric::buckets`] has them in whole units.
        bounds: &'static [u64],
    },
}

/// What a [`Metric`] is measured in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Unit {
    /// How many.
    Count,
    /// Seconds.
    Seconds,
    /// Bytes.
    Bytes,
    /// Parts of a whole: 1 is all of it.
    Ratio,
}

impl Unit {
    /// How many parts a unit has in a histogram, which adds whole numbers.
    pub(super) const fn parts(self) -> u64 {
        match self {
            Self::Count | Self::Bytes => 1,
            Self::Seconds => 1_000_000_000,
            Self::Ratio => 1_000_000,
        }
    }

    /// A number of units, as parts.
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

/// A label of a [`Metric`]. None is ever a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Label {
    /// What it is called.
    pub name: &'static str,
    /// All values that it can have; empty for a scope or a store, which the program names.
    pub values: &'static [&'static str],
}

const SCOPE: Label = Label { name: "scope", values: &[] };
const STORE: Label = Label { name: "store", values: &[] };

impl Metric {
    /// The upper bounds of a histogram in its unit, without the last one, which is infinite; empty for other kinds.
    ///
    /// An exporter of the facade `metrics` has to be told of them; see `docs/metrics.md`.
    pub fn buckets(&self) -> Vec<f64> {
        match self.kind {
            Kind::Histogram { bounds } => bounds.iter().map(|bound| self.whole(*bound)).collect(),
            _ => Vec::new(),
        }
    }

    /// Parts of the unit, as a number of units.
    #[allow(clippy::cast_precision_loss, reason = "what is read by people and plotted")]
    pub(super) fn whole(&self, parts: u64) -> f64 {
        parts as f64 / self.unit.parts() as f64
    }
}

/// A closed set of label values.
macro_rules! labels {
    ($(#[$about:meta])* $name:ident, $label:literal { $($(#[$what:meta])* $variant:ident = $text:literal,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        #[non_exhaustive]
        pub enum $name { $($(#[$what])* $variant,)+ }

        impl $name {
            /// The label with all its values.
            pub const LABEL: Label = Label { name: $label, values: &[$($text),+] };

            /// The value of the label.
            pub const fn name(self) -> &'static str {
                Self::LABEL.values[self as usize]
            }
        }
    };
}

labels! {
    /// How a call ended, as a label: every call has exactly one.
    CallOutcome, "outcome" {
        /// The body ran, and its result is recorded.
        Executed = "executed",
        /// The body ran and returned an error, which was released or recorded.
        Failed = "failed",
        /// A recorded result was returned.
        Replayed = "replayed",
        /// A recorded result was returned after a wait for the attempt that made it.
        WaitedReplayed = "waited_replayed",
        /// Another attempt was running.
        InProgress = "in_progress",
        /// The payload was another one.
        FingerprintMismatch = "fingerprint_mismatch",
        /// An earlier run had been interrupted, and `on_crash = fail` allows no other.
        Interrupted = "interrupted",
        /// As many attempts as are allowed had started.
        AttemptsExhausted = "attempts_exhausted",
        /// The key was missing.
        MissingKey = "missing_key",
        /// Key, fingerprint or policy was not valid.
        Invalid = "invalid",
        /// The operation had finished, and its result can't be replayed.
        ResultUnavailable = "result_unavailable",
        /// The store failed, and the body did not run.
        StoreError = "store_error",
        /// The lease was lost while the body ran: to another attempt, or with the record.
        LeaseLost = "lease_lost",
        /// The body ran for longer than its `timeout`.
        TimedOut = "timed_out",
        /// The body ran, and its result could not be recorded.
        Unrecorded = "unrecorded",
        /// The call was dropped before it returned.
        Cancelled = "cancelled",
        /// The body panicked.
        Panicked = "panicked",
        /// The body ran without a reservation: the store was away, or the key was missing.
        Unprotected = "unprotected",
        /// Shadow mode: the body ran, and would not have.
        Suppressed = "suppressed",
        /// Mode `off`: the body ran, and the store was not asked.
        Off = "off",
    }
}

labels! {
    /// What is to be done with the message of a call, as a label.
    DispositionLabel, "disposition" {
        /// Acknowledge it.
        Ack = "ack",
        /// Deliver it again.
        Retry = "retry",
        /// Set it aside.
        DeadLetter = "dead_letter",
    }
}

labels! {
    /// Why it is unknown whether an effect has happened, as a label; see [`Doubt`](crate::policy::Doubt).
    DoubtLabel, "kind" {
        /// The lease was lost while the body ran: to another attempt, or with the record.
        LeaseLost = "lease_lost",
        /// The body ran, and its result could not be recorded.
        Unrecorded = "unrecorded",
        /// The body ran for longer than its `timeout`.
        TimedOut = "timed_out",
        /// The call was dropped while its body ran.
        Cancelled = "cancelled",
        /// The body panicked.
        Panicked = "panicked",
        /// An earlier run had been interrupted.
        Interrupted = "interrupted",
    }
}

labels! {
    /// Why a completion is recorded without its result, as a label.
    Dropped, "why" {
        /// It was larger than the policy or the store allows.
        TooLarge = "too_large",
        /// Its codec could not write it.
        Unencodable = "unencodable",
    }
}

labels! {
    /// What shadow mode says of the keys of a handler, as a label.
    KeyQuality, "kind" {
        /// One key came with several payloads: operations that differ share it.
        TooCoarse = "too_coarse",
        /// One payload came under several keys: a duplicate may have another key.
        TooFine = "too_fine",
    }
}

labels! {
    /// An operation of a store, as a label.
    StoreOp, "op" {
        /// [`Store::reserve`](crate::Store::reserve).
        Reserve = "reserve",
        /// [`Store::begin`](crate::Store::begin).
        Begin = "begin",
        /// [`Store::renew`](crate::Store::renew).
        Renew = "renew",
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
    /// The kind of a [`StoreError`](crate::StoreError), as a label.
    ErrorKind, "kind" {
        /// Nothing was written.
        Unavailable = "unavailable",
        /// The write may have landed.
        Unconfirmed = "unconfirmed",
        /// What is stored is not a record.
        Corrupt = "corrupt",
        /// Settings, version or rights are wrong.
        Misconfigured = "misconfigured",
        /// The store is full.
        Full = "full",
        /// The result is larger than the store can hold.
        TooLarge = "too_large",
        /// The store can't do this at all.
        Unsupported = "unsupported",
        /// The user's transaction can't go on.
        Aborted = "aborted",
    }
}

labels! {
    /// What became of the renewal of a lease, as a label.
    BeatResult, "result" {
        /// The lease is held on.
        Renewed = "renewed",
        /// Another attempt has the lease, or the record is gone.
        Refused = "refused",
        /// The store failed; it is asked again.
        Failed = "failed",
    }
}

labels! {
    /// What became of telling a broker that a message is being handled, as a label.
    BrokerBeat, "result" {
        /// It was told.
        Told = "told",
        /// It could not be told; it is told again.
        Failed = "failed",
        /// It extends the message no further.
        Lost = "lost",
    }
}

const MILLI: u64 = 1_000_000;
const SECOND: u64 = 1_000 * MILLI;
/// From half a millisecond to half an hour.
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
/// From a hundredth to ten times the whole.
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
/// From a hundredth of the whole to twice as much, closer where it ends.
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
/// From a second to a month.
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
        "Calls that have ended, by how they ended.";
    DISPOSITIONS: "idem_dispositions_total", Kind::Counter, Count, [SCOPE, DispositionLabel::LABEL],
        "Calls that have returned, by what is to be done with the message.";
    UNCERTAIN: "idem_uncertain_total", Kind::Counter, Count, [SCOPE, DoubtLabel::LABEL],
        "Calls after which the effect may have happened and the record does not know.";
    TAKEOVERS: "idem_takeovers_total", Kind::Counter, Count, [SCOPE],
        "Attempts that took over from one whose lease had lapsed.";
    BODY_SECONDS: "idem_body_seconds", histogram(TIMES), Seconds, [SCOPE],
        "How long bodies ran.";
    BODY_LEASE_RATIO: "idem_body_lease_ratio", histogram(PARTS), Ratio, [SCOPE],
        "How long bodies ran, in leases: above 1 they live on heartbeats.";
    WAIT_SECONDS: "idem_wait_seconds", histogram(TIMES), Seconds, [SCOPE],
        "How long duplicates waited for a running attempt.";
    REPLAY_AGE_SECONDS: "idem_replay_age_seconds", histogram(AGES), Seconds, [SCOPE],
        "How old records were when they were replayed, counted from when their attempts began.";
    REPLAY_AGE_RATIO: "idem_replay_age_ratio", histogram(PARTS_OF_TTL), Ratio, [SCOPE],
        "The same in parts of `ttl`: near 1 duplicates are about to be forgotten, and to run.";
    ATTEMPTS: "idem_attempts", histogram(ATTEMPT_NUMBERS), Count, [SCOPE],
        "The number of the attempt that succeeded.";
    RESULT_BYTES: "idem_result_bytes", histogram(SIZES), Bytes, [SCOPE],
        "The size of recorded results.";
    RESULTS_DROPPED: "idem_results_dropped_total", Kind::Counter, Count, [SCOPE, Dropped::LABEL],
        "Completions that are recorded without their result, so that duplicates can't replay it.";
    KEY_QUALITY: "idem_key_quality_total", Kind::Counter, Count, [SCOPE, KeyQuality::LABEL],
        "Shadow mode: calls whose key seems to name too much or too little.";
    STORE_SECONDS: "idem_store_seconds", histogram(TIMES), Seconds, [STORE, StoreOp::LABEL],
        "How long operations of the store took; the least bucket if they were answered at once.";
    STORE_ERRORS: "idem_store_errors_total", Kind::Counter, Count, [STORE, StoreOp::LABEL, ErrorKind::LABEL],
        "Operations of the store that failed, each try of its own.";
    LEASES_HELD: "idem_leases_held", Kind::Gauge, Count, [STORE],
        "Leases that this process keeps alive.";
    BEATS: "idem_beats_total", Kind::Counter, Count, [STORE, BeatResult::LABEL],
        "Renewals of leases, by what became of them.";
    BEAT_LAG_SECONDS: "idem_beat_lag_seconds", histogram(TIMES), Seconds, [STORE],
        "How much later than planned leases were renewed.";
    BROKER_BEATS: "idem_broker_beats_total", Kind::Counter, Count, [STORE, BrokerBeat::LABEL],
        "Times that a broker was to be told that a message is being handled.";
}
