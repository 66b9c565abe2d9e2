//! Alerts and panels of the dashboard, as expressions over the table of metrics.

/// Recipient of an alert.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// Calls the person on duty immediately.
    Page,
    /// Opens a ticket that the team reads the next day.
    Ticket,
}

impl Severity {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Page => "page",
            Self::Ticket => "ticket",
        }
    }
}

/// Alerting rule for Prometheus.
pub(crate) struct Alert {
    pub(crate) name: &'static str,
    pub(crate) expr: &'static str,
    /// Time for which the expression must hold before the alert fires.
    pub(crate) holds: &'static str,
    pub(crate) severity: Severity,
    /// Summary, with labels of the series in braces.
    pub(crate) summary: &'static str,
}

/// Growth of the counters that `$series` selects, within the window `$window`, summed by the labels `$by`.
///
/// `increase` alone is zero for a series whose first sample already holds the event, as in a pod that has just started.
/// Such a series had no sample at the beginning of the window, so its last value is its growth. `last_over_time` keeps
/// the series of a pod that has ended since.
macro_rules! grown {
    ($by:literal, $series:literal, $window:literal) => {
        concat!(
            "sum by (",
            $by,
            ") ((last_over_time(",
            $series,
            "[",
            $window,
            "]) unless ",
            $series,
            " offset ",
            $window,
            ") or increase(",
            $series,
            "[",
            $window,
            "]))"
        )
    };
}

pub(crate) static ALERTS: &[Alert] = &[
    Alert {
        name: "IdemUnrecorded",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="unrecorded"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.scope }}: a body ran and its result could not be recorded",
    },
    Alert {
        name: "IdemInterrupted",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="interrupted"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.scope }}: an operation was interrupted, and an operator has to decide about it",
    },
    Alert {
        name: "IdemUnresolved",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="unresolved"}"#, "1h"), " > 10"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: reconcilers were asked {{ $value }} times and did not know the outcome",
    },
    // `last_over_time` keeps the value of a pod that has ended, so that the alert goes on until another pod has
    // counted.
    Alert {
        name: "IdemWaitingForDecision",
        expr: "max by (store) (last_over_time(idem_keys_waiting_for_decision[5m])) > 0",
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: {{ $value }} keys wait for the decision of an operator",
    },
    Alert {
        name: "IdemAttemptsExhausted",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="attempts_exhausted"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.scope }}: an operation has used up its attempts",
    },
    Alert {
        name: "IdemLeaseLost",
        expr: concat!(grown!("scope", r#"idem_uncertain_total{kind="lease_lost"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.scope }}: an attempt lost its lease while its body ran",
    },
    Alert {
        name: "IdemBeatsLate",
        expr: "histogram_quantile(0.99, sum by (store, le) (rate(idem_beat_lag_seconds_bucket[5m]))) > 5",
        holds: "2m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: leases are renewed {{ $value | humanizeDuration }} late, and will soon be lost",
    },
    Alert {
        name: "IdemBeatsFail",
        expr: r#"sum by (store) (rate(idem_beats_total{result="failed"}[5m])) > 0.5 * sum by (store) (rate(idem_beats_total[5m]))"#,
        holds: "2m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: most renewals of leases get no answer",
    },
    Alert {
        name: "IdemStoreErrors",
        expr: "sum by (store) (rate(idem_store_errors_total[5m])) > 0.05 * sum by (store) (rate(idem_store_seconds_count[5m]))",
        holds: "5m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: more than one operation in twenty fails",
    },
    Alert {
        name: "IdemStoreFull",
        expr: concat!(grown!("store", r#"idem_store_errors_total{kind="full"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: the store is full, and refuses new keys",
    },
    Alert {
        name: "IdemStoreSlow",
        expr: r#"histogram_quantile(0.99, sum by (store, le) (rate(idem_store_seconds_bucket{op=~"reserve|begin|renew|finish|release"}[2m]))) > 0.5"#,
        holds: "1m",
        severity: Severity::Page,
        summary: "{{ $labels.store }}: one operation in a hundred takes {{ $value | humanizeDuration }} or longer",
    },
    Alert {
        name: "IdemUnprotected",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="unprotected"}"#, "10m"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: bodies ran without protection",
    },
    Alert {
        name: "IdemTakeovers",
        expr: concat!(grown!("scope", "idem_takeovers_total", "1h"), " > 5"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: {{ $value | humanize }} attempts died within an hour",
    },
    Alert {
        name: "IdemTimedOut",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="timed_out"}"#, "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: a body ran for longer than its `timeout`",
    },
    Alert {
        name: "IdemMismatch",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="fingerprint_mismatch"}"#, "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: a key was used with another payload",
    },
    Alert {
        name: "IdemMissingKeys",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome=~"missing_key|invalid"}"#, "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: messages have no valid key",
    },
    Alert {
        name: "IdemResultsDropped",
        expr: concat!(grown!("scope, why", "idem_results_dropped_total", "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: results can't be replayed ({{ $labels.why }})",
    },
    Alert {
        name: "IdemResultUnavailable",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="result_unavailable"}"#, "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: duplicates could not get the result of their operation",
    },
    Alert {
        name: "IdemHeldUp",
        expr: concat!(grown!("scope", r#"idem_calls_total{outcome="in_progress"}"#, "10m"), " > 3"),
        holds: "30m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: for half an hour duplicates have been refused because an attempt holds their key",
    },
    Alert {
        name: "IdemNearlyForgotten",
        expr: concat!(
            grown!("scope", "idem_replay_age_ratio_count", "1h"),
            " - ",
            grown!("scope", r#"idem_replay_age_ratio_bucket{le="0.8"}"#, "1h"),
            " > 0"
        ),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: duplicates come when most of `ttl` is over; later duplicates will run again",
    },
    Alert {
        name: "IdemSlowWaits",
        expr: "histogram_quantile(0.99, sum by (scope, le) (rate(idem_wait_seconds_bucket[10m]))) > 30",
        holds: "10m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: duplicates wait {{ $value | humanizeDuration }} for running attempts",
    },
    Alert {
        name: "IdemLivesOnBeats",
        expr: "histogram_quantile(0.95, sum by (scope, le) (rate(idem_body_lease_ratio_bucket[1h]))) > 5",
        holds: "1h",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: bodies run for many leases, so each body depends on many renewals",
    },
    Alert {
        name: "IdemBrokerBeatsFail",
        expr: concat!(grown!("store", r#"idem_broker_beats_total{result!="told"}"#, "10m"), " > 3"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.store }}: messages can't be extended in the broker while they are handled",
    },
    Alert {
        name: "IdemKeyQuality",
        expr: concat!(grown!("scope, kind", "idem_key_quality_total", "1h"), " > 0"),
        holds: "0m",
        severity: Severity::Ticket,
        summary: "{{ $labels.scope }}: keys in shadow mode are {{ $labels.kind }}",
    },
];

/// Panel of the dashboard.
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    pub(crate) expr: &'static str,
    pub(crate) legend: &'static str,
    pub(crate) unit: &'static str,
}

/// Row of panels on the dashboard.
pub(crate) struct Row {
    pub(crate) title: &'static str,
    pub(crate) panels: &'static [Panel],
}

pub(crate) static ROWS: &[Row] = &[
    Row {
        title: "Traffic",
        panels: &[
            Panel {
                title: "Calls by outcome",
                expr: r#"sum by (outcome) (rate(idem_calls_total{scope=~"$scope"}[$__rate_interval]))"#,
                legend: "{{outcome}}",
                unit: "ops",
            },
            Panel {
                title: "Messages by disposition",
                expr: r#"sum by (disposition) (rate(idem_dispositions_total{scope=~"$scope"}[$__rate_interval]))"#,
                legend: "{{disposition}}",
                unit: "ops",
            },
            Panel {
                title: "Bodies, 99 %",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_body_seconds_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "s",
            },
        ],
    },
    Row {
        title: "Duplicates",
        panels: &[
            Panel {
                title: "Replays and waits",
                expr: r#"sum by (outcome) (rate(idem_calls_total{scope=~"$scope",outcome=~"replayed|waited_replayed|in_progress"}[$__rate_interval]))"#,
                legend: "{{outcome}}",
                unit: "ops",
            },
            Panel {
                title: "Waits, 99 %",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_wait_seconds_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "s",
            },
            Panel {
                title: "Age of replayed records, 99 %",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_replay_age_seconds_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "s",
            },
            Panel {
                title: "Age of replayed records, in parts of ttl",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_replay_age_ratio_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "percentunit",
            },
            Panel {
                title: "Attempts until success, 99 %",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_attempts_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "none",
            },
        ],
    },
    Row {
        title: "Trouble",
        panels: &[
            Panel {
                title: "Uncertain: the effect may have happened",
                expr: grown!("scope, kind", r#"idem_uncertain_total{scope=~"$scope"}"#, "$__rate_interval"),
                legend: "{{scope}} {{kind}}",
                unit: "none",
            },
            Panel {
                title: "Takeovers",
                expr: grown!("scope", r#"idem_takeovers_total{scope=~"$scope"}"#, "$__rate_interval"),
                legend: "{{scope}}",
                unit: "none",
            },
            Panel {
                title: "For a person to decide",
                expr: grown!(
                    "scope, outcome",
                    r#"idem_calls_total{scope=~"$scope",outcome=~"interrupted|attempts_exhausted|result_unavailable|fingerprint_mismatch"}"#,
                    "$__rate_interval"
                ),
                legend: "{{scope}} {{outcome}}",
                unit: "none",
            },
            Panel {
                title: "Keys that wait for a decision",
                expr: "max by (store) (idem_keys_waiting_for_decision)",
                legend: "{{store}}",
                unit: "none",
            },
            Panel {
                title: "Results dropped",
                expr: grown!("scope, why", r#"idem_results_dropped_total{scope=~"$scope"}"#, "$__rate_interval"),
                legend: "{{scope}} {{why}}",
                unit: "none",
            },
            Panel {
                title: "Result size, 99 %",
                expr: r#"histogram_quantile(0.99, sum by (scope, le) (rate(idem_result_bytes_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "bytes",
            },
            Panel {
                title: "Keys, in shadow mode",
                expr: grown!("scope, kind", r#"idem_key_quality_total{scope=~"$scope"}"#, "$__rate_interval"),
                legend: "{{scope}} {{kind}}",
                unit: "none",
            },
        ],
    },
    Row {
        title: "Leases",
        panels: &[
            Panel {
                title: "Leases held",
                expr: "sum by (store) (idem_leases_held)",
                legend: "{{store}}",
                unit: "none",
            },
            Panel {
                title: "Beats",
                expr: "sum by (store, result) (rate(idem_beats_total[$__rate_interval]))",
                legend: "{{store}} {{result}}",
                unit: "ops",
            },
            Panel {
                title: "Beats late by, 99 %",
                expr: "histogram_quantile(0.99, sum by (store, le) (rate(idem_beat_lag_seconds_bucket[$__rate_interval])))",
                legend: "{{store}}",
                unit: "s",
            },
            Panel {
                title: "Bodies in leases, 95 %",
                expr: r#"histogram_quantile(0.95, sum by (scope, le) (rate(idem_body_lease_ratio_bucket{scope=~"$scope"}[$__rate_interval])))"#,
                legend: "{{scope}}",
                unit: "percentunit",
            },
            Panel {
                title: "Beats of brokers",
                expr: "sum by (store, result) (rate(idem_broker_beats_total[$__rate_interval]))",
                legend: "{{store}} {{result}}",
                unit: "ops",
            },
        ],
    },
    Row {
        title: "Store",
        panels: &[
            Panel {
                title: "Operations, 99 %",
                expr: "histogram_quantile(0.99, sum by (store, op, le) (rate(idem_store_seconds_bucket[$__rate_interval])))",
                legend: "{{store}} {{op}}",
                unit: "s",
            },
            Panel {
                title: "Operations",
                expr: "sum by (store, op) (rate(idem_store_seconds_count[$__rate_interval]))",
                legend: "{{store}} {{op}}",
                unit: "ops",
            },
            Panel {
                title: "Errors",
                expr: "sum by (store, op, kind) (rate(idem_store_errors_total[$__rate_interval]))",
                legend: "{{store}} {{op}} {{kind}}",
                unit: "ops",
            },
        ],
    },
];
