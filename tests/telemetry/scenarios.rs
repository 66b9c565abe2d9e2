//! Calls with every outcome, each with the expected span, events and counters.

use std::future::{pending, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use futures::FutureExt as _;
use idem_runtime::clock::ManualClock;
use idem_runtime::metrics::{self, Snapshot};
use idem_runtime::outbox::OutgoingMessage;
use idem_runtime::store::{Reservation, ReserveRequest, Verdict};
use idem_runtime::{
    Error, InProgress, Key, MemoryStore, MissingKey, Mode, OnCrash, OnStoreError, Operation, Policy, Reconciliation,
    Store, StoreErrorKind, StoreExt as _, current,
};
use idem_tests::polls::poll_once;
use idem_tests::{Fault, FaultyStore, StoreCall, settle};

pub(crate) const LEASE: Duration = Duration::from_secs(30);
const TTL: Duration = Duration::from_secs(3600);
/// Nine tenths of the retention, rounded to 2^24 ns (17 ms), the unit in which the memory store keeps times.
pub(crate) const LATE: Duration = Duration::from_nanos(193_119 << 24);
const LATE_MS: &str = "3239999";
pub(crate) const POLICY: Policy = Policy::new(TTL).lease(LEASE);
pub(crate) const SCOPE: &str = "ship";

/// Store, and a clock that stands still until a test advances it.
pub(crate) struct World {
    pub(crate) clock: ManualClock,
    pub(crate) store: FaultyStore,
}

pub(crate) type Running<'a> = Pin<Box<dyn Future<Output = Result<u32, Error>> + 'a>>;

impl World {
    pub(crate) fn new() -> Self {
        let clock = ManualClock::new();
        let store = FaultyStore::new(&MemoryStore::options().clock(clock.clone()).build());
        Self { clock, store }
    }

    pub(crate) fn key() -> Key {
        Key::new(SCOPE, "order:42").unwrap()
    }

    pub(crate) fn operation(&self, policy: Policy) -> Operation {
        Operation::new(&self.store, Ok(Self::key()), policy)
    }

    pub(crate) async fn call(&self, policy: Policy) -> Result<u32, Error> {
        self.operation(policy).run(async { Ok(7) }).await
    }

    /// Makes a call whose body takes `duration`.
    pub(crate) async fn lasting(&self, policy: Policy, duration: Duration) -> Result<u32, Error> {
        let body = async {
            self.store.context().clock().sleep(duration).await;
            Ok(7)
        };
        self.operation(policy).run(body).await
    }

    /// Starts a call whose body never ends, and polls it up to its first `await`.
    pub(crate) async fn hang(&self, policy: Policy) -> Running<'_> {
        let mut call: Running<'_> = Box::pin(self.operation(policy).run(pending()));
        assert!(poll_once(call.as_mut()).await.is_pending());
        call
    }

    /// Makes a failing call of a handler with a reconciler, which leaves the operation in doubt.
    async fn doubt(&self) {
        let operation = self.operation(POLICY).uncertain_errors();
        let operation = operation.reconcile(async { unreachable!("nothing is in doubt") });
        operation.run(async { Err::<u32, _>(Error::from(missing())) }).await.unwrap_err();
    }

    /// Leaves a pending record, as a process that died in a body does.
    pub(crate) async fn crash(&self, on_crash: OnCrash) {
        let request = ReserveRequest::new(Self::key(), self.store.context().new_owner(), LEASE, TTL).on_crash(on_crash);
        let reserved = self.store.reserve(&request).await;
        let Ok(Reservation::Granted { lease, .. }) = reserved else { panic!("{reserved:?}") };
        assert_eq!(self.store.begin(&lease).await.unwrap(), Verdict::Applied);
    }

    /// Runs `future`, and advances the clock by a second whenever `future` waits.
    pub(crate) async fn driving<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
                return output;
            }
            settle().await;
            self.clock.advance(Duration::from_secs(1));
        }
    }

    pub(crate) fn metrics(&self) -> Snapshot {
        self.store.metrics()
    }
}

/// Scenario, with the expected telemetry of its last call.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: for<'a> fn(&'a World) -> Pin<Box<dyn Future<Output = ()> + 'a>>,
    /// Expected `idem.outcome` of the span, and label of the counter.
    pub(crate) outcome: &'static str,
    /// Expected `idem.disposition`, if the call returned.
    pub(crate) disposition: Option<&'static str>,
    /// True if the span must have the status `ERROR` and the outcome as its `error.type`.
    pub(crate) is_error: bool,
    /// Further expected fields of the span.
    pub(crate) fields: &'static [(&'static str, &'static str)],
    /// Expected events of level `INFO` and above: level, and start of the message.
    pub(crate) events: &'static [(&'static str, &'static str)],
    /// Further series that must count 1: name, and one label with its value.
    pub(crate) counts: &'static [(&'static str, &'static str, &'static str)],
}

macro_rules! run {
    (|$world:ident| $body:expr) => {
        |$world| {
            Box::pin(async move {
                $body;
            })
        }
    };
}

const PLAIN: Scenario = Scenario {
    name: "",
    run: |_| Box::pin(std::future::ready(())),
    outcome: "",
    disposition: None,
    is_error: false,
    fields: &[],
    events: &[],
    counts: &[],
};

const OUTAGE: (&str, &str) = ("WARN", "the store does not answer");

pub(crate) static SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "first run",
        run: run!(|world| world.call(POLICY).await.unwrap()),
        outcome: "executed",
        disposition: Some("ack"),
        fields: &[
            ("idem.attempt", "1"),
            ("idem.takeover", "false"),
            ("idem.store", "memory"),
            ("idem.lease_ms", "30000"),
        ],
        counts: &[
            ("idem_attempts", "scope", SCOPE),
            ("idem_result_bytes", "scope", SCOPE),
            ("idem_body_seconds", "scope", SCOPE),
        ],
        ..PLAIN
    },
    Scenario {
        name: "duplicate of a finished operation",
        run: run!(|world| {
            world.call(POLICY).await.unwrap();
            world.call(POLICY).await.unwrap();
        }),
        outcome: "replayed",
        disposition: Some("ack"),
        fields: &[("idem.replayed", "true"), ("idem.attempt", "1"), ("idem.age_ms", "0")],
        counts: &[("idem_replay_age_seconds", "scope", SCOPE), ("idem_replay_age_ratio", "scope", SCOPE)],
        ..PLAIN
    },
    Scenario {
        name: "duplicate near the end of `ttl`",
        run: run!(|world| {
            world.call(POLICY).await.unwrap();
            world.clock.advance(LATE);
            world.call(POLICY).await.unwrap();
        }),
        outcome: "replayed",
        disposition: Some("ack"),
        fields: &[("idem.replayed", "true"), ("idem.age_ms", LATE_MS)],
        counts: &[("idem_replay_age_seconds", "scope", SCOPE), ("idem_replay_age_ratio", "scope", SCOPE)],
        ..PLAIN
    },
    Scenario {
        name: "duplicate of a running attempt",
        run: run!(|world| {
            let running = world.hang(POLICY).await;
            world.call(POLICY).await.unwrap_err();
            // The call stays under way for the rest of the test.
            std::mem::forget(running);
        }),
        outcome: "in_progress",
        disposition: Some("retry"),
        fields: &[("idem.retry_after_ms", "30000")],
        ..PLAIN
    },
    Scenario {
        name: "duplicate that waits",
        run: run!(|world| {
            let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(10)));
            let both = futures::future::join(world.lasting(wait, Duration::from_secs(2)), world.call(wait));
            assert!(world.driving(both).await.1.is_ok());
        }),
        outcome: "waited_replayed",
        disposition: Some("ack"),
        fields: &[("idem.replayed", "true"), ("idem.waited_ms", "2000")],
        counts: &[("idem_wait_seconds", "scope", SCOPE)],
        ..PLAIN
    },
    Scenario {
        name: "the body returns an error",
        run: run!(|world| world
            .operation(POLICY)
            .run(async { Err::<u32, _>(Error::from(missing())) })
            .await
            .unwrap_err()),
        outcome: "failed",
        disposition: Some("retry"),
        is_error: true,
        ..PLAIN
    },
    Scenario {
        name: "takeover after a crash",
        run: run!(|world| {
            world.crash(OnCrash::Retry).await;
            world.clock.advance(LEASE);
            world.call(POLICY).await.unwrap();
        }),
        outcome: "executed",
        disposition: Some("ack"),
        fields: &[("idem.attempt", "2"), ("idem.takeover", "true")],
        events: &[("WARN", "took over")],
        counts: &[("idem_takeovers_total", "scope", SCOPE)],
        ..PLAIN
    },
    Scenario {
        name: "lease lost while the body runs",
        run: run!(|world| {
            world.store.always(StoreCall::Renew, Fault::Before(StoreErrorKind::Unavailable));
            let cut_off = FaultyStore::new(&world.store);
            let mut first =
                Box::pin(Operation::new(&cut_off, Ok(World::key()), POLICY).run(pending::<Result<u32, Error>>()));
            assert!(poll_once(first.as_mut()).await.is_pending());
            settle().await;
            world.clock.advance(LEASE);
            settle().await;
            // Another process has left this attempt behind.
            world.crash(OnCrash::Retry).await;
            world.store.always(StoreCall::Renew, Fault::None);
            world.clock.advance(LEASE / 3);
            settle().await;
            assert!(matches!(first.await, Err(Error::LeaseLost { .. })));
        }),
        outcome: "lease_lost",
        disposition: Some("retry"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[OUTAGE, ("WARN", "the store answers again"), ("WARN", "the lease was lost")],
        counts: &[("idem_uncertain_total", "kind", "lease_lost"), ("idem_beats_total", "result", "refused")],
    },
    Scenario {
        name: "the body runs for longer than its `timeout`",
        run: run!(|world| {
            let policy = POLICY.timeout(Duration::from_secs(60));
            world.driving(world.lasting(policy, Duration::from_secs(600))).await.unwrap_err();
        }),
        outcome: "timed_out",
        disposition: Some("retry"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[("WARN", "the body ran for longer than its `timeout`")],
        counts: &[("idem_uncertain_total", "kind", "timed_out")],
    },
    Scenario {
        name: "store unreachable before the body",
        run: run!(|world| {
            world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
            world.driving(world.call(POLICY)).await.unwrap_err();
        }),
        outcome: "store_error",
        disposition: Some("retry"),
        is_error: true,
        events: &[OUTAGE],
        ..PLAIN
    },
    Scenario {
        name: "store unreachable before the body, under `on_store_error = run`",
        run: run!(|world| {
            world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Unavailable));
            world.driving(world.call(POLICY.on_store_error(OnStoreError::Run))).await.unwrap();
        }),
        outcome: "unprotected",
        disposition: Some("ack"),
        events: &[OUTAGE],
        ..PLAIN
    },
    Scenario {
        name: "store unreachable after the body",
        run: run!(|world| {
            world.store.always(StoreCall::Finish, Fault::Before(StoreErrorKind::Unavailable));
            world.driving(world.call(POLICY)).await.unwrap_err();
        }),
        outcome: "unrecorded",
        disposition: Some("retry"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[
            OUTAGE,
            ("WARN", "the outage goes on: the store does not answer"),
            ("ERROR", "the body ran, and its result could not be recorded"),
        ],
        counts: &[("idem_uncertain_total", "kind", "unrecorded")],
    },
    Scenario {
        name: "a message that the broker does not confirm",
        run: run!(|world| {
            let store = world.store.clone().with_sender(idem_tests::brokers::AwayBroker::default());
            let push = async {
                current()?.outbox().push("orders", OutgoingMessage::new("paid"))?;
                Ok::<_, Error>(7)
            };
            Operation::new(&store, Ok(World::key()), POLICY).run(push).await.unwrap_err();
        }),
        outcome: "unsent",
        disposition: Some("retry"),
        is_error: true,
        events: &[("WARN", "the messages of an operation are not all sent")],
        ..PLAIN
    },
    Scenario {
        name: "another payload under the key",
        run: run!(|world| {
            world.operation(POLICY).fingerprint(&1).run(async { Ok::<_, Error>(7) }).await.unwrap();
            world.operation(POLICY).fingerprint(&2).run(async { Ok::<_, Error>(7) }).await.unwrap_err();
        }),
        outcome: "fingerprint_mismatch",
        disposition: Some("dead_letter"),
        is_error: true,
        events: &[("WARN", "the key was used with another payload")],
        ..PLAIN
    },
    Scenario {
        name: "a crash under `on_crash = fail`",
        run: run!(|world| {
            world.crash(OnCrash::Fail).await;
            world.clock.advance(LEASE);
            world.call(POLICY.on_crash(OnCrash::Fail)).await.unwrap_err();
        }),
        outcome: "interrupted",
        disposition: Some("dead_letter"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[("ERROR", "the effect of an earlier attempt is in doubt, and no other may run")],
        counts: &[("idem_uncertain_total", "kind", "interrupted")],
    },
    Scenario {
        name: "an uncertain error",
        run: run!(|world| {
            let body = async { Err::<u32, _>(Error::from(missing())) };
            world.operation(POLICY).uncertain_errors().run(body).await.unwrap_err();
        }),
        outcome: "failed",
        disposition: Some("dead_letter"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[("ERROR", "the body returned an error, its effect is in doubt, and no other body may run")],
        counts: &[("idem_uncertain_total", "kind", "reported")],
    },
    Scenario {
        name: "an uncertain error, and a reconciler that finds the effect",
        run: run!(|world| {
            world.doubt().await;
            let operation = world.operation(POLICY).reconcile(async { Ok::<_, Error>(Reconciliation::Done(7)) });
            operation.run(async { Ok(8) }).await.unwrap();
        }),
        outcome: "reconciled",
        disposition: Some("ack"),
        events: &[
            ("WARN", "the body returned an error, and its effect is in doubt; the next delivery asks the reconciler"),
            ("WARN", "the effect of an earlier attempt is in doubt: its reconciler is asked"),
        ],
        counts: &[("idem_uncertain_total", "kind", "reported")],
        ..PLAIN
    },
    Scenario {
        name: "an uncertain error, and a reconciler that does not know",
        run: run!(|world| {
            world.doubt().await;
            let ask_again = Duration::from_secs(60);
            let unknown = async move { Ok::<_, Error>(Reconciliation::Unknown { ask_again }) };
            world.operation(POLICY).reconcile(unknown).run(async { Ok(8) }).await.unwrap_err();
        }),
        outcome: "unresolved",
        disposition: Some("retry"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[
            ("WARN", "the body returned an error, and its effect is in doubt; the next delivery asks the reconciler"),
            ("WARN", "the effect of an earlier attempt is in doubt: its reconciler is asked"),
        ],
        counts: &[("idem_uncertain_total", "kind", "reported")],
    },
    Scenario {
        name: "an uncertain error of a step",
        run: run!(|world| {
            let body = async {
                let wire = current()?.step("wire").irreversible().fail();
                wire.run(async |_| Err::<u32, _>(Error::from(missing()))).await
            };
            world.operation(POLICY).run(body).await.unwrap_err();
        }),
        outcome: "failed",
        disposition: Some("dead_letter"),
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[
            ("WARN", "the effect of a step is in doubt"),
            ("ERROR", "the body returned an error, its effect is in doubt, and no other body may run"),
        ],
        counts: &[("idem_uncertain_total", "kind", "reported"), ("idem_steps_total", "outcome", "in_doubt")],
    },
    Scenario {
        name: "a journaled step that a later attempt does not reach",
        run: run!(|world| {
            let body = async {
                current()?.step("charge").run(async |_| Ok::<_, Error>(7_u32)).await?;
                Err::<u32, _>(Error::from(missing()))
            };
            world.operation(POLICY).run(body).await.unwrap_err();
            world.call(POLICY).await.unwrap();
        }),
        outcome: "executed",
        disposition: Some("ack"),
        events: &[("WARN", "an earlier attempt has journaled the step, and this attempt has not reached it")],
        counts: &[("idem_steps_total", "outcome", "ran")],
        ..PLAIN
    },
    Scenario {
        name: "too many attempts",
        run: run!(|world| {
            let once = POLICY.max_attempts(1);
            world.operation(once).run(async { Err::<u32, _>(Error::from(missing())) }).await.unwrap_err();
            world.call(once).await.unwrap_err();
        }),
        outcome: "attempts_exhausted",
        disposition: Some("dead_letter"),
        is_error: true,
        events: &[("ERROR", "as many attempts as are allowed have started")],
        ..PLAIN
    },
    Scenario {
        name: "the result is too large",
        run: run!(|world| world.call(POLICY.max_result_bytes(0)).await.unwrap()),
        outcome: "executed",
        disposition: Some("ack"),
        events: &[("WARN", "the completion is recorded without its result")],
        counts: &[("idem_results_dropped_total", "why", "too_large")],
        ..PLAIN
    },
    Scenario {
        name: "duplicate of an operation whose result was too large",
        run: run!(|world| {
            world.call(POLICY.max_result_bytes(0)).await.unwrap();
            world.call(POLICY).await.unwrap_err();
        }),
        outcome: "result_unavailable",
        disposition: Some("dead_letter"),
        is_error: true,
        events: &[
            ("WARN", "the completion is recorded without its result"),
            ("WARN", "the operation has finished, and its result can't be replayed"),
        ],
        ..PLAIN
    },
    Scenario {
        name: "a message without a key",
        run: run!(|world| {
            let missing = || Err(missing());
            Operation::new(&world.store, missing(), POLICY).run(async { Ok::<_, Error>(7) }).await.unwrap_err();
        }),
        outcome: "missing_key",
        disposition: Some("dead_letter"),
        is_error: true,
        events: &[("WARN", "a message has no key")],
        ..PLAIN
    },
    Scenario {
        name: "a message without a key, under `missing_key = run`",
        run: run!(|world| {
            let policy = POLICY.missing_key(MissingKey::Run);
            Operation::new(&world.store, Err(missing()), policy).run(async { Ok::<_, Error>(7) }).await.unwrap();
        }),
        outcome: "unprotected",
        disposition: Some("ack"),
        ..PLAIN
    },
    Scenario {
        name: "a policy that can't be honoured",
        run: run!(|world| world.call(POLICY.lease(Duration::from_millis(1))).await.unwrap_err()),
        outcome: "invalid",
        disposition: Some("retry"),
        is_error: true,
        fields: &[("idem.lease_ms", "1")],
        events: &[("WARN", "the call can't be protected")],
        ..PLAIN
    },
    Scenario {
        name: "the call is dropped while its body runs",
        run: run!(|world| drop(world.hang(POLICY).await)),
        outcome: "cancelled",
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[("INFO", "the call was dropped while its body ran")],
        counts: &[("idem_uncertain_total", "kind", "cancelled")],
        ..PLAIN
    },
    Scenario {
        name: "the call is dropped while its body runs, under `on_crash = fail`",
        run: run!(|world| drop(world.hang(POLICY.on_crash(OnCrash::Fail)).await)),
        outcome: "cancelled",
        is_error: true,
        events: &[("ERROR", "the body started and did not return")],
        counts: &[("idem_uncertain_total", "kind", "cancelled")],
        ..PLAIN
    },
    Scenario {
        name: "the body panics",
        run: run!(|world| {
            let call = world.operation(POLICY).run(async { std::panic::resume_unwind(Box::new("no address")) });
            let panicked: Result<Result<u32, Error>, _> = AssertUnwindSafe(call).catch_unwind().await;
            assert!(panicked.is_err());
        }),
        outcome: "panicked",
        is_error: true,
        fields: &[("idem.uncertain", "true")],
        events: &[("WARN", "the body panicked")],
        counts: &[("idem_uncertain_total", "kind", "panicked")],
        ..PLAIN
    },
    Scenario {
        name: "shadow mode: a duplicate",
        run: run!(|world| {
            world.call(POLICY).await.unwrap();
            world.call(POLICY.mode(Mode::Shadow)).await.unwrap();
        }),
        outcome: "suppressed",
        disposition: Some("ack"),
        events: &[("INFO", "shadow mode: would have been replayed")],
        ..PLAIN
    },
    Scenario {
        name: "shadow mode: another payload under the key",
        run: run!(|world| {
            let shadow = POLICY.mode(Mode::Shadow);
            world.operation(shadow).fingerprint(&1).run(async { Ok::<_, Error>(7) }).await.unwrap();
            world.operation(shadow).fingerprint(&2).run(async { Ok::<_, Error>(7) }).await.unwrap();
        }),
        outcome: "suppressed",
        disposition: Some("ack"),
        events: &[("INFO", "shadow mode: would have been refused")],
        counts: &[("idem_key_quality_total", "kind", "too_coarse")],
        ..PLAIN
    },
    Scenario {
        name: "shadow mode: a payload under another key",
        run: run!(|world| {
            let shadow = POLICY.mode(Mode::Shadow);
            let other = Operation::new(&world.store, Key::new(SCOPE, "order:43"), shadow);
            other.fingerprint(&1).run(async { Ok::<_, Error>(7) }).await.unwrap();
            world.operation(shadow).fingerprint(&1).run(async { Ok::<_, Error>(7) }).await.unwrap();
        }),
        outcome: "executed",
        disposition: Some("ack"),
        counts: &[("idem_key_quality_total", "kind", "too_fine")],
        ..PLAIN
    },
    Scenario {
        name: "mode `off`",
        run: run!(|world| world.call(POLICY.mode(Mode::Off)).await.unwrap()),
        outcome: "off",
        disposition: Some("ack"),
        ..PLAIN
    },
];

fn missing() -> idem_runtime::key::KeyError {
    Key::new(SCOPE, "").unwrap_err()
}

/// Value of `metric` with these labels.
pub(crate) fn count(snapshot: &Snapshot, metric: &str, labels: &[(&str, &str)]) -> u64 {
    let metric = metrics::TABLE.iter().find(|it| it.name == metric).unwrap_or_else(|| panic!("no metric `{metric}`"));
    snapshot.count(metric, labels)
}
