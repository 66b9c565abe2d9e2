//! Telemetry of calls: spans, events, metrics and health; and the documents that are generated from the table of
//! metrics.
#![allow(
    clippy::unused_async,
    clippy::unchecked_time_subtraction,
    reason = "bodies need not wait; the durations are constants"
)]

mod telemetry {
    pub(crate) mod alerts;
    pub(crate) mod capture;
    pub(crate) mod documents;
    pub(crate) mod rules;
    pub(crate) mod scenarios;
}

use std::collections::BTreeSet;
use std::future::pending;
use std::time::Duration;

use idem_runtime::metrics::{self, CallOutcome};
use idem_runtime::store::{HealthProblem, ReserveRequest};
use idem_runtime::{
    Error, Key, KeyDisplay, MemoryStore, OnCrash, Operation, Store as _, StoreErrorKind, StoreExt as _, observe,
};
use idem_tests::polls::poll_once;
use idem_tests::{Fault, FaultyStore, StoreCall, settle};
use tracing::Level;

use self::telemetry::capture::Capture;
use self::telemetry::scenarios::{LATE, LEASE, POLICY, SCENARIOS, SCOPE, Scenario, World, count};

/// Runs a scenario, and asserts that its last call has the expected span, events and counters.
async fn check(scenario: &Scenario) {
    let Scenario { name, run, outcome, disposition, is_error, fields, events, counts } = scenario;
    let world = World::new();
    let capture = Capture::start();
    run(&world).await;
    let spans = capture.spans("idempotent");
    // If two calls overlap, the span of the call with the expected outcome is checked.
    let span = spans.iter().rev().find(|span| span.field("idem.outcome") == Some(*outcome));
    let span = span.unwrap_or_else(|| panic!("{name}: no span with the outcome {outcome}: {spans:#?}"));
    assert_eq!(span.level, Level::INFO, "{name}");
    assert_eq!(span.field("otel.name"), Some("idempotent ship"), "{name}");
    assert_eq!(span.field("idem.scope"), Some(SCOPE), "{name}");
    assert_eq!(span.field("idem.disposition"), *disposition, "{name}");
    assert_eq!(span.field("otel.status_code"), is_error.then_some("ERROR"), "{name}");
    assert_eq!(span.field("error.type"), is_error.then_some(*outcome), "{name}");
    for (field, value) in *fields {
        assert_eq!(span.field(field), Some(*value), "{name}: {field}: {span:#?}");
    }
    let seen = capture.events(Level::INFO);
    let told: Vec<_> = seen.iter().map(|event| (event.level.as_str(), event.name.as_str())).collect();
    assert_eq!(told.len(), events.len(), "{name}: {told:#?}");
    for ((level, message), (expected, begins)) in told.iter().zip(*events) {
        assert!(level == expected && message.starts_with(begins), "{name}: {told:#?}");
    }
    let snapshot = world.metrics();
    let calls = spans.iter().filter(|span| span.field("idem.outcome") == Some(*outcome)).count() as u64;
    assert_eq!(count(&snapshot, "idem_calls_total", &[("scope", SCOPE), ("outcome", outcome)]), calls, "{name}");
    if let Some(disposition) = disposition {
        assert!(count(&snapshot, "idem_dispositions_total", &[("disposition", disposition)]) > 0, "{name}");
    }
    for (metric, label, value) in *counts {
        assert_eq!(count(&snapshot, metric, &[(label, value)]), 1, "{name}: {metric}");
    }
    // A scenario must count no uncertain effect unless `counts` lists the counter.
    if !counts.iter().any(|(metric, ..)| *metric == "idem_uncertain_total") {
        assert_eq!(count(&snapshot, "idem_uncertain_total", &[]), 0, "{name}");
    }
}

#[tokio::test]
async fn each_scenario_has_the_expected_span_events_and_counters() {
    for scenario in SCENARIOS {
        check(scenario).await;
    }
}

#[test]
fn every_outcome_label_has_a_scenario() {
    let shown: BTreeSet<_> = SCENARIOS.iter().map(|scenario| scenario.outcome).collect();
    let all: BTreeSet<_> = CallOutcome::LABEL.values.iter().copied().collect();
    assert_eq!(shown, all);
}

#[tokio::test]
async fn spans_events_and_errors_show_keys_as_the_policy_says() {
    let key = World::key();
    for (display, shown) in [
        (KeyDisplay::Whole, key.to_string()),
        (KeyDisplay::Prefix(5), "ship/order%…".to_owned()),
        (KeyDisplay::Hashed, key.clone().shown_as(KeyDisplay::Hashed).to_string()),
    ] {
        let (world, capture) = (World::new(), Capture::start());
        let policy = POLICY.key_display(display).on_crash(OnCrash::Fail);
        world.crash(OnCrash::Fail).await;
        world.clock.advance(LEASE);
        let error = world.call(policy).await.unwrap_err();
        assert!(error.to_string().contains(&format!("`{shown}`")), "{error}");
        assert_eq!(capture.spans("idempotent")[0].field("idem.key"), Some(&*shown));
        assert_eq!(capture.events(Level::ERROR)[0].field("key"), Some(&*shown));
        // The error contains the whole key, for a person who searches for the record.
        assert_eq!(error.key(), Some(&key));
    }
}

#[tokio::test]
async fn no_span_and_no_event_holds_a_result_or_a_payload() {
    let (world, capture) = (World::new(), Capture::start());
    for max in [1024, 0] {
        let policy = POLICY.max_result_bytes(max);
        let operation = Operation::new(&world.store, Key::new(SCOPE, max), policy).fingerprint("payload-4711");
        operation.run(async { Ok::<_, Error>("result-4711".to_owned()) }).await.unwrap();
    }
    let seen = format!("{:?} {:?}", capture.spans("idempotent"), capture.events(Level::TRACE));
    assert!(!seen.contains("4711") && seen.contains("ship/1024"), "{seen}");
}

#[tokio::test]
async fn the_span_of_a_call_is_inside_its_callers_and_encloses_operations() {
    let (world, capture) = (World::new(), Capture::start());
    world.store.always(StoreCall::Reserve, Fault::Slow(1));
    let span = tracing::info_span!("process orders");
    let call = async {
        observe(world.call(POLICY)).message("kafka", "orders", "0/42").await.0.unwrap();
    };
    tracing::Instrument::instrument(call, span).await;
    let call = &capture.spans("idempotent")[0];
    assert_eq!(call.inside, ["process orders"]);
    for (field, value) in [
        ("messaging.operation.type", "process"),
        ("messaging.system", "kafka"),
        ("messaging.destination.name", "orders"),
        ("messaging.message.id", "0/42"),
    ] {
        assert_eq!(call.field(field), Some(value), "{call:?}");
    }
    let operations = capture.spans("idem.store");
    // The store answered the completion immediately, so the completion has no span.
    assert_eq!(operations.len(), 1, "{operations:#?}");
    assert_eq!(operations[0].inside, ["idempotent", "process orders"]);
    assert_eq!((operations[0].level, operations[0].field("db.operation.name")), (Level::DEBUG, Some("reserve")));
    assert_eq!(operations[0].field("otel.status_code"), None);
}

#[tokio::test]
async fn a_replay_names_the_trace_of_the_run_that_made_the_result() {
    let (world, capture) = (World::new(), Capture::start());
    for trace in ["4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"] {
        let parent = format!("00-{trace}-00f067aa0ba902b7-01");
        observe(world.call(POLICY)).traceparent(parent.parse().ok()).await.0.unwrap();
    }
    let spans = capture.spans("idempotent");
    assert_eq!(spans[0].field("idem.original_trace"), None);
    assert_eq!(spans[1].field("idem.original_trace"), Some("4bf92f3577b34da6a3ce929d0e0e4736"));
}

#[tokio::test]
async fn replays_near_the_end_of_ttl_have_a_counter() {
    let world = World::new();
    let within = |share: &str| {
        let text = world.metrics().prometheus_text();
        let line = format!("idem_replay_age_ratio_bucket{{scope=\"{SCOPE}\",le=\"{share}\"}} ");
        let found = text.lines().find_map(|it| it.strip_prefix(&line)).unwrap_or_else(|| panic!("{line}: {text}"));
        found.parse::<u64>().unwrap()
    };
    world.call(POLICY).await.unwrap();
    for (step, [hundredth, half, most, all]) in
        [(Duration::ZERO, [1, 1, 1, 1]), (LATE / 2, [1, 2, 2, 2]), (LATE / 2, [1, 2, 2, 3])]
    {
        world.clock.advance(step);
        world.call(POLICY).await.unwrap();
        assert_eq!(["0.01", "0.5", "0.8", "+Inf"].map(within), [hundredth, half, most, all], "after {step:?}");
    }
    // After the retention the store forgets the record, and the next call runs the body instead of a replay.
    world.clock.advance(Duration::from_secs(3600));
    world.call(POLICY).await.unwrap();
    assert_eq!(within("+Inf"), 3);
    assert_eq!(count(&world.metrics(), "idem_replay_age_seconds", &[]), 3);
}

#[cfg(feature = "http")]
#[tokio::test]
async fn a_replay_over_http_names_the_trace_of_the_run_that_made_the_response() {
    use idem_runtime::http::{Caller, IdempotencyLayer};
    use tower::ServiceExt as _;

    const TRACES: [&str; 2] = ["4bf92f3577b34da6a3ce929d0e0e4736", "0af7651916cd43dd8448eb211c80319c"];
    let capture = Capture::start();
    let store = MemoryStore::new();
    let app = axum::Router::new()
        .route("/payments", axum::routing::post(async || "paid"))
        .layer(IdempotencyLayer::new(&store, POLICY, Caller::single()));
    let pay = async |key: &str, trace: Option<&str>| {
        let mut request = http::Request::post("/payments").header("idempotency-key", key);
        if let Some(trace) = trace {
            request = request.header("traceparent", format!("00-{trace}-00f067aa0ba902b7-01"));
        }
        let request = request.body(axum::body::Body::empty()).unwrap();
        let response = app.clone().oneshot(request).await.unwrap();
        assert_eq!(response.status(), 200);
        response.headers().contains_key("idempotent-replayed")
    };
    let original = |at: usize| {
        let spans = capture.spans("idempotent");
        spans[at].field("idem.original_trace").map(str::to_owned)
    };
    assert!(!pay("\"k\"", Some(TRACES[0])).await);
    assert_eq!(original(0), None);
    // A client repeats its request in another trace, or without a trace.
    for (at, trace) in [(1, Some(TRACES[1])), (2, None)] {
        assert!(pay("\"k\"", trace).await, "{trace:?}");
        assert_eq!(original(at).as_deref(), Some(TRACES[0]), "{trace:?}");
    }
    // A run without a trace, or with an invalid one, leaves no trace for the replay to name.
    for (at, key, nonsense) in [(3, "\"m\"", None), (5, "\"n\"", Some("nonsense"))] {
        assert!(!pay(key, nonsense).await);
        assert!(pay(key, Some(TRACES[1])).await);
        assert_eq!(original(at + 1), None, "{key}");
    }
}

#[tokio::test]
async fn the_span_of_a_failed_operation_has_the_error() {
    let (world, capture) = (World::new(), Capture::start());
    world.store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
    world.call(POLICY).await.unwrap_err();
    let operations = capture.spans("idem.store");
    assert_eq!(operations[0].field("error.type"), Some("misconfigured"));
    let snapshot = world.metrics();
    let labels = [("store", "memory"), ("op", "reserve"), ("kind", "misconfigured")];
    assert_eq!(count(&snapshot, "idem_store_errors_total", &labels), 1);
    assert_eq!(count(&snapshot, "idem_store_errors_total", &[]), 1);
}

#[tokio::test]
async fn an_outage_of_ten_minutes_is_a_few_lines_in_the_log() {
    let (world, capture) = (World::new(), Capture::start());
    for call in [StoreCall::Reserve, StoreCall::Renew, StoreCall::Finish, StoreCall::Release] {
        world.store.always(call, Fault::Before(StoreErrorKind::Unavailable));
    }
    // During the outage there are handlers that hold leases, duplicates, and handlers that are cancelled.
    world.store.always(StoreCall::Reserve, Fault::None);
    let mut running: Vec<_> = (0..20)
        .map(|order| {
            let policy = POLICY.timeout(Duration::from_secs(86_400));
            let operation = Operation::new(&world.store, Key::new(SCOPE, order), policy);
            Box::pin(operation.run(pending::<Result<u32, Error>>()))
        })
        .collect();
    for call in &mut running {
        assert!(poll_once(call.as_mut()).await.is_pending());
    }
    world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
    let minutes = async {
        // Each call tries three times, for two seconds of simulated time.
        for call in 0..300 {
            world.call(POLICY).await.unwrap_err();
            if call % 20 == 10 {
                running.pop();
            }
        }
    };
    // The outage lasts ten minutes, and then the store answers again.
    world.driving(minutes).await;
    for call in [StoreCall::Reserve, StoreCall::Renew, StoreCall::Finish, StoreCall::Release] {
        world.store.always(call, Fault::None);
    }
    world.clock.advance(LEASE / 3);
    settle().await;
    world.call(POLICY).await.unwrap();
    // The log has a few lines about the outage, and the last line has the counts.
    let lines = capture.events(Level::WARN);
    let texts: Vec<_> = lines.iter().map(|line| line.name.split(';').next().unwrap_or_default()).collect();
    assert!((4..=9).contains(&lines.len()), "{texts:#?}");
    assert_eq!(texts[0], "the store does not answer");
    assert_eq!(texts.iter().filter(|text| **text == "the store answers again").count(), 1, "{texts:#?}");
    assert_eq!(*texts.last().unwrap(), "the store answers again", "{texts:#?}");
    let last = lines.last().unwrap();
    for counted in ["reservations", "renewals", "endings"] {
        let count: u64 = last.field(counted).expect("a count").parse().unwrap();
        assert!(count > 10, "{counted}: {last:?}");
    }
    assert!(count(&world.metrics(), "idem_beats_total", &[("result", "failed")]) > 100);
}

#[tokio::test]
async fn the_log_of_a_late_result_names_its_key_and_call() {
    let (world, capture) = (World::new(), Capture::start());
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
    let mut call = Box::pin(world.call(POLICY));
    assert!(poll_once(call.as_mut()).await.is_pending());
    drop(call);
    world.driving(world.store.context().flush()).await;
    let late = capture.events(Level::ERROR).pop().expect("an event");
    assert!(late.name.starts_with("the result could not be recorded"), "{late:?}");
    assert_eq!(late.field("key"), Some("ship/order:42"));
    assert!(late.field("call").is_some_and(|call| call.contains("dropped while that was being recorded")), "{late:?}");
    assert_eq!(late.inside, [""; 0], "the span of the call is over");
}

#[tokio::test]
async fn beats_and_leases_are_counted() {
    let world = World::new();
    let running = world.hang(POLICY).await;
    assert_eq!(count(&world.metrics(), "idem_leases_held", &[("store", "memory")]), 1);
    for _ in 0..3 {
        settle().await;
        world.clock.advance(LEASE / 3);
    }
    settle().await;
    // The process stood still for a while, so its beat is late.
    world.clock.advance(LEASE / 2);
    settle().await;
    let snapshot = world.metrics();
    assert_eq!(count(&snapshot, "idem_beats_total", &[("result", "renewed")]), 4);
    assert_eq!(count(&snapshot, "idem_beat_lag_seconds", &[]), 4);
    let late = format!("idem_beat_lag_seconds_sum{{store=\"memory\"}} {}", (LEASE / 6).as_secs());
    assert!(snapshot.prometheus_text().contains(&late), "{}", snapshot.prometheus_text());
    drop(running);
    assert_eq!(count(&world.metrics(), "idem_leases_held", &[]), 0);
}

#[tokio::test]
async fn all_handles_of_a_store_share_their_counters() {
    let store = MemoryStore::new();
    Operation::new(&store, Ok(World::key()), POLICY).run(async { Ok::<_, Error>(7) }).await.unwrap();
    for handle in [store.clone().metrics(), store.handle().metrics(), store.upkeep().metrics()] {
        assert_eq!(count(&handle, "idem_calls_total", &[]), 1);
        assert_eq!(count(&handle.scope("other"), "idem_calls_total", &[]), 0);
    }
    assert_eq!(count(&store.peer().metrics(), "idem_calls_total", &[]), 0, "another process");
}

#[tokio::test]
async fn an_unreachable_broker_is_counted() {
    let world = World::new();
    let capture = Capture::start();
    let mut answers = [Ok(()), Err("away"), Err("away"), Ok(())].into_iter();
    let call = observe(world.lasting(POLICY, Duration::from_secs(45)))
        .on_beat(Duration::from_secs(12), move |_| std::future::ready(answers.next().unwrap_or(Ok(()))));
    world.driving(call).await.0.unwrap();
    let snapshot = world.metrics();
    assert_eq!(count(&snapshot, "idem_broker_beats_total", &[("result", "failed")]), 2);
    assert!(count(&snapshot, "idem_broker_beats_total", &[("result", "told")]) >= 2);
    let lines = capture.events(Level::WARN);
    assert_eq!(lines.len(), 2, "{lines:#?}");
    assert!(lines[0].name.starts_with("the broker could not be told"), "{lines:#?}");
    assert!(lines[1].name.starts_with("the broker is told again"), "{lines:#?}");
}

#[tokio::test]
async fn the_health_of_a_store_names_the_problem() {
    let axes =
        |health: &idem_runtime::store::Health| -> Vec<_> { health.problems.iter().map(HealthProblem::axis).collect() };
    let world = World::new();
    let health = world.store.health().await;
    assert!(health.is_ready(), "{health}");
    assert_eq!(health.to_string(), "memory: ready, 0 leases held");
    let running = world.hang(POLICY).await;
    let health = world.store.health().await;
    assert!(health.is_ready() && health.leases == 1, "{health}");

    for (kind, axis) in [(StoreErrorKind::Unavailable, "store"), (StoreErrorKind::Misconfigured, "schema")] {
        world.store.next(StoreCall::Ping, Fault::Before(kind));
        assert_eq!(axes(&world.store.health().await), [axis]);
    }

    // The store refuses two beats, one after the other.
    world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
    settle().await;
    world.clock.advance(LEASE / 3 + Duration::from_secs(1));
    settle().await;
    assert_eq!(world.store.health().await.beat_lag, Duration::from_secs(1));
    world.clock.advance(LEASE / 3);
    settle().await;
    let health = world.store.health().await;
    assert_eq!(axes(&health), ["calls", "beat_lag"]);
    let shown = health.to_string();
    assert!(shown.starts_with("memory: calls: operations of calls fail, the last one "), "{shown}");
    assert!(shown.ends_with("; beat_lag: a lease is due for renewal since 11.0s"), "{shown}");
    drop(running);
    world.clock.advance(LEASE);
    assert!(world.store.health().await.is_ready(), "no lease is left to renew");
}

#[tokio::test]
async fn a_store_that_answers_pings_and_fails_calls_is_not_ready() {
    let world = World::new();
    for kind in [StoreErrorKind::Full, StoreErrorKind::Misconfigured] {
        world.store.next(StoreCall::Reserve, Fault::Before(kind));
        world.call(POLICY).await.unwrap_err();
        let health = world.store.health().await;
        assert!(matches!(health.problems[..], [HealthProblem::CallsFail { .. }]), "{health}");
        // A call that succeeds ends the problem.
        world.call(POLICY).await.unwrap();
        assert!(world.store.health().await.is_ready());
        world.clock.advance(Duration::from_secs(600));
    }
    // A call whose result can't be recorded has failed, too. A reservation that succeeds meanwhile does not end the
    // problem.
    world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Full));
    world.clock.advance(Duration::from_secs(3600));
    world.driving(world.call(POLICY)).await.unwrap_err();
    assert!(!world.store.health().await.is_ready());
    // Without calls, the failure counts for 30 s: a process that gets no calls must become ready again.
    world.store.always(StoreCall::Finish, Fault::None);
    world.clock.advance(Duration::from_secs(31));
    let health = world.store.health().await;
    assert!(health.is_ready(), "{health}");
}

#[tokio::test]
async fn a_store_that_takes_a_second_longer_is_logged_and_named_in_its_health() {
    let (world, capture) = (World::new(), Capture::start());
    for call in [StoreCall::Reserve, StoreCall::Finish] {
        world.store.always(call, Fault::Slow(1));
    }
    let slow = async {
        for order in 0..50 {
            let body = async { Ok::<_, Error>(7) };
            Operation::new(&world.store, Key::new(SCOPE, order), POLICY).run(body).await.unwrap();
        }
    };
    world.driving(slow).await;
    let health = world.store.health().await;
    assert!(health.is_ready() && health.slow_for.is_some_and(|time| time > Duration::from_secs(30)), "{health:?}");
    assert!(health.to_string().contains("and slow for "), "{health}");
    for call in [StoreCall::Reserve, StoreCall::Finish] {
        world.store.always(call, Fault::None);
    }
    world.store.always(StoreCall::Reserve, Fault::Slow(0));
    Operation::new(&world.store, Key::new(SCOPE, 99), POLICY).run(async { Ok::<_, Error>(7) }).await.unwrap();
    let lines = capture.events(Level::WARN);
    let texts: Vec<_> = lines.iter().map(|line| line.name.as_str()).collect();
    assert!((3..=5).contains(&lines.len()), "{texts:#?}");
    assert!(texts[0].starts_with("the store is slow: "), "{texts:#?}");
    assert_eq!(*texts.last().unwrap(), "the store answers quickly again");
    assert_eq!(world.store.health().await.slow_for, None);
}

#[tokio::test]
async fn a_store_that_fails_every_second_operation_is_logged_as_such() {
    let (world, capture) = (World::new(), Capture::start());
    for _ in 0..60 {
        world.store.next(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
        world.call(POLICY).await.unwrap_err();
        world.call(POLICY).await.unwrap();
        world.clock.advance(Duration::from_secs(1));
    }
    let lines = capture.events(Level::WARN);
    let texts: Vec<_> = lines.iter().map(|line| line.name.as_str()).collect();
    assert!(texts[0].starts_with("the store refuses"), "{texts:#?}");
    assert!(texts[2..].iter().all(|text| text.starts_with("the store fails and answers by turns")), "{texts:#?}");
    assert!((3..=5).contains(&texts.len()), "{texts:#?}");
}

#[tokio::test]
async fn the_gauge_of_waiting_keys_counts_until_an_operator_decides() {
    let (world, key) = (World::new(), World::key());
    let gauge =
        || {
            world.metrics().prometheus_text().lines().find_map(|line| {
                line.strip_prefix("idem_keys_waiting_for_decision{store=\"memory\"} ").map(str::to_owned)
            })
        };
    assert_eq!(gauge(), None, "nothing was counted");
    assert_eq!(world.store.count_undecided().await.unwrap(), 0);
    assert_eq!(gauge().as_deref(), Some("0"));
    world.crash(OnCrash::Fail).await;
    assert_eq!(world.store.count_undecided().await.unwrap(), 0, "its lease holds");
    world.clock.advance(LEASE);
    // The record waits although no delivery has come yet.
    assert_eq!(world.store.count_undecided().await.unwrap(), 1);
    assert_eq!(gauge().as_deref(), Some("1"));
    // A key without `on_crash = fail` runs again, so no operator has to decide.
    let other = Key::new(SCOPE, "other").unwrap();
    let request = ReserveRequest::new(other, world.store.context().new_owner(), LEASE, Duration::from_secs(3600));
    world.store.reserve(&request).await.unwrap();
    world.clock.advance(LEASE);
    assert_eq!(world.store.count_undecided().await.unwrap(), 1);
    let operator = world.store.operator();
    let found = operator.inspect(&key).await.unwrap().expect("a record");
    operator.reopen(&key, &found).await.unwrap();
    assert_eq!((world.store.count_undecided().await.unwrap(), gauge().as_deref()), (0, Some("0")));
}

#[test]
fn a_store_whose_heartbeat_has_no_runtime_is_unhealthy() {
    let world = World::new();
    let runtime = || tokio::runtime::Builder::new_current_thread().build().unwrap();
    let first = runtime();
    let running = first.block_on(world.hang(POLICY));
    assert!(runtime().block_on(world.store.health()).is_ready());
    drop(first);
    let health = runtime().block_on(world.store.health());
    assert!(matches!(health.problems[..], [HealthProblem::NoHeartbeat]), "{health}");
    std::mem::forget(running);
}

#[tokio::test]
async fn a_wrapper_around_a_store_counts_each_operation_once() {
    let store = FaultyStore::new(&MemoryStore::new());
    Operation::new(&store, Ok(World::key()), POLICY).run(async { Ok::<_, Error>(7) }).await.unwrap();
    for op in ["reserve", "finish"] {
        assert_eq!(store.metrics().count(&metrics::STORE_SECONDS, &[("op", op)]), 1, "{op}");
    }
}
