//! Tests of the tools for testing handlers: the tools find each mistake in a handler, and report none in a
//! correct handler.
#![allow(clippy::disallowed_methods, reason = "what a handler does with time is simulated here")]

mod simulation {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::time::Duration;

    use idem_runtime::clock::Clock;
    use idem_runtime::testing::Simulation;
    use idem_runtime::{Error, MemoryStore, Outcome, idempotent, observe};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns the order in which three tasks were polled.
    fn turns(seed: u64) -> Vec<u32> {
        let simulation = Simulation::new(seed);
        let turns = Rc::new(RefCell::new(Vec::new()));
        simulation.run(async {
            let tasks: Vec<_> = (0..3)
                .map(|task| {
                    let turns = Rc::clone(&turns);
                    simulation.spawn(async move {
                        for _ in 0..5 {
                            turns.borrow_mut().push(task);
                            tokio::task::yield_now().await;
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
        });
        turns.take()
    }

    #[test]
    fn a_seed_repeats_the_order_of_its_tasks() {
        assert_eq!(turns(7), turns(7));
        let different: std::collections::BTreeSet<_> = (0..20).map(turns).collect();
        assert!(different.len() > 15, "seeds draw different orders, not {different:?}");
    }

    #[test]
    fn spawned_tasks_of_tokio_run_between_the_simulated_tasks() {
        let order = |seed| {
            let simulation = Simulation::new(seed);
            let turns = std::sync::Arc::new(std::sync::Mutex::new(String::new()));
            simulation.run(async {
                let spawned = std::sync::Arc::clone(&turns);
                let spawned = tokio::spawn(async move {
                    for _ in 0..4 {
                        spawned.lock().unwrap().push('r');
                        tokio::task::yield_now().await;
                    }
                });
                for _ in 0..4 {
                    turns.lock().unwrap().push('s');
                    tokio::task::yield_now().await;
                }
                spawned.await.unwrap();
            });
            turns.lock().unwrap().clone()
        };
        assert_eq!(order(3), order(3));
        let different: std::collections::BTreeSet<_> = (0..20).map(order).collect();
        assert!(different.len() > 5, "{different:?}");
    }

    #[test]
    fn time_passes_while_no_task_can_run() {
        let simulation = Simulation::new(1);
        let clock = simulation.clock();
        let passed = simulation.run(async {
            let started = clock.now();
            let other = simulation.spawn({
                let clock = clock.clone();
                async move {
                    clock.sleep(3 * MINUTE).await;
                    clock.now()
                }
            });
            tokio::time::sleep(2 * MINUTE).await;
            let mine = clock.now();
            (mine.saturating_since(started), other.await.unwrap().saturating_since(started))
        });
        assert_eq!(passed, (2 * MINUTE, 3 * MINUTE));
        assert_eq!(simulation.clock().now().since_origin(), 3 * MINUTE, "readable from outside as well");
        simulation.clock().advance(MINUTE);
        assert_eq!(simulation.clock().now().since_origin(), 4 * MINUTE);
    }

    #[test]
    fn a_jump_of_the_clock_wakes_a_task_whose_sleep_ends_earlier() {
        let simulation = Simulation::new(1);
        let clock = simulation.clock();
        simulation.run(async {
            let sleeper = simulation.spawn(clock.sleep(MINUTE));
            tokio::task::yield_now().await;
            clock.advance(5 * MINUTE);
            sleeper.await.unwrap();
            assert_eq!(clock.now().since_origin(), 5 * MINUTE);
        });
    }

    #[test]
    fn a_run_without_a_task_that_can_continue_panics() {
        let simulation = Simulation::new(9);
        let stuck = simulation.try_run(std::future::pending::<()>()).unwrap_err();
        assert!(!stuck.is_spinning());
        assert_eq!(stuck.after(), Duration::from_secs(24 * 3600));
        assert!(stuck.to_string().contains("seed 9"), "{stuck}");

        simulation.limit_polls(1000);
        let spinning = async {
            // The task never ends, and can always run.
            loop {
                tokio::task::yield_now().await;
            }
        };
        let stuck = simulation.try_run(spinning).unwrap_err();
        assert!(stuck.is_spinning());
        // The simulation can be used again.
        assert_eq!(simulation.run(async { 7 }), 7);
    }

    #[test]
    #[should_panic(expected = "seed 5")]
    fn a_run_that_is_stuck_panics_with_its_seed() {
        Simulation::new(5).run(std::future::pending::<()>());
    }

    struct NotesDrop(Rc<Cell<u32>>);

    impl Drop for NotesDrop {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    #[test]
    fn a_killed_task_is_dropped_at_the_chosen_await() {
        let simulation = Simulation::new(1);
        for killed_at in 0..6 {
            let (polls, drops) = (Rc::new(Cell::new(0_u64)), Rc::new(Cell::new(0)));
            let future = {
                let (polls, guard) = (Rc::clone(&polls), NotesDrop(Rc::clone(&drops)));
                async move {
                    let _guard = guard;
                    for _ in 0..3 {
                        polls.set(polls.get() + 1);
                        tokio::task::yield_now().await;
                    }
                    polls.set(polls.get() + 1);
                    "done"
                }
            };
            let (output, seen) = simulation.run(async {
                let task = simulation.spawn_killed_at(killed_at, future);
                while !task.is_finished() {
                    tokio::task::yield_now().await;
                }
                (task.polls(), task.await)
            });
            // The task has three awaits, so its fourth poll is ready, and a later kill has no effect.
            assert_eq!(output, killed_at.min(4), "polls of a worker that was killed at await {killed_at}");
            assert_eq!(polls.get(), killed_at.min(4));
            assert_eq!(seen.is_ok(), killed_at > 3, "{seen:?}");
            assert_eq!(drops.get(), 1);
        }
    }

    #[test]
    fn a_task_can_be_killed_by_another_and_by_itself() {
        let simulation = Simulation::new(1);
        simulation.run(async {
            let other = simulation.spawn(std::future::pending::<()>());
            tokio::task::yield_now().await;
            other.kill();
            assert!(other.is_finished());
            assert!(other.await.is_err());

            let own: Rc<RefCell<Option<idem_runtime::testing::Task<()>>>> = Rc::default();
            let task = simulation.spawn({
                let own = Rc::clone(&own);
                async move {
                    own.borrow().as_ref().unwrap().kill();
                    tokio::task::yield_now().await;
                    unreachable!("killed before");
                }
            });
            *own.borrow_mut() = Some(task);
            let task = std::future::poll_fn(|cx| {
                let mut own = own.borrow_mut();
                std::pin::Pin::new(own.as_mut().unwrap()).poll(cx)
            });
            assert!(task.await.is_err());
        });
    }

    #[test]
    fn tasks_that_remain_are_dropped_when_the_simulation_ends() {
        let simulation = Simulation::new(1);
        let drops = Rc::new(Cell::new(0));
        let guard = NotesDrop(Rc::clone(&drops));
        simulation.run(async {
            drop(simulation.spawn(async move {
                let _guard = guard;
                std::future::pending::<()>().await;
            }));
            tokio::task::yield_now().await;
        });
        assert_eq!(drops.get(), 1);
    }

    #[idempotent(key = "order:{order_id}", ttl = "7d", store = store, in_progress = wait("5m"))]
    async fn ship(store: &MemoryStore, order_id: u64, takes: Duration) -> Result<u64, Error> {
        tokio::time::sleep(takes).await;
        Ok(order_id)
    }

    /// Returns the outcome and the time of ten deliveries of one message, each to its own worker. Some
    /// workers are killed.
    fn deliveries(seed: u64) -> Vec<(Option<Outcome>, Duration)> {
        let simulation = Simulation::new(seed);
        let clock = simulation.clock();
        let store = MemoryStore::options().clock(clock.clone()).build();
        simulation.run(async {
            let tasks: Vec<_> = (0..10)
                .map(|n| {
                    let (store, clock) = (store.peer(), clock.clone());
                    let killed_at = if n < 5 { simulation.random(4) } else { u64::MAX };
                    simulation.spawn_killed_at(killed_at, async move {
                        let (_, outcome) = observe(ship(&store, 42, 2 * MINUTE)).await;
                        (outcome, clock.now().since_origin())
                    })
                })
                .collect();
            let mut ended = Vec::new();
            for task in tasks {
                ended.push(match task.await {
                    Ok((outcome, at)) => (Some(outcome), at),
                    Err(_) => (None, Duration::ZERO),
                });
            }
            ended
        })
    }

    #[test]
    fn the_engine_runs_on_simulated_time() {
        for seed in 0..50 {
            let ended = deliveries(seed);
            assert_eq!(ended, deliveries(seed), "seed {seed} repeats");
            let executed = ended.iter().flat_map(|(outcome, _)| outcome).filter(|it| it.executed()).count();
            assert!(executed == 1, "seed {seed}: {ended:?}");
            // The lease of 30 s is always renewed, so no delivery takes over.
            assert!(ended.iter().flat_map(|(outcome, _)| outcome).all(|it| !it.took_over()), "seed {seed}: {ended:?}");
        }
    }
}

mod explorer {
    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    use idem_runtime::testing::{Explorer, NoAnswer, Problem, Report, SimulatedStore, Worker, explore};
    use idem_runtime::{Disposition, Error, OnError, Reconciliation, Store, current, idempotent, observe};
    use serde::{Deserialize, Serialize};

    /// Application of one worker.
    struct App {
        store: SimulatedStore,
        worker: Worker,
    }

    impl App {
        fn new(worker: Worker) -> Self {
            Self { store: worker.store(), worker }
        }

        async fn charge(&self, key: Option<String>) -> Result<(), NoAnswer> {
            self.effect("charge", key).await
        }

        async fn effect(&self, name: &str, key: Option<String>) -> Result<(), NoAnswer> {
            let effect = self.worker.effect(name);
            match key {
                Some(key) => effect.key(key).await,
                None => effect.await,
            }
            .map(drop)
        }
    }

    fn child_key(name: &str) -> Option<String> {
        current().ok().map(|attempt| attempt.child_key(name))
    }

    fn is_repeated(problem: &Problem) -> bool {
        matches!(problem, Problem::Repeated { .. })
    }

    fn is_missing(problem: &Problem) -> bool {
        matches!(problem, Problem::Missing { .. })
    }

    /// Returns the scenarios with a problem of this kind, and checks that each scenario shows the same problem when it
    /// is played alone.
    fn scenarios(report: &Report, alone: impl Fn(Explorer) -> Report, is: fn(&Problem) -> bool) -> BTreeSet<String> {
        let all = report.findings();
        let found: BTreeSet<_> = all.iter().filter(|it| is(it.problem())).map(|it| it.scenario().to_owned()).collect();
        for scenario in found.iter().take(10) {
            let of_all: Vec<_> = all.iter().filter(|it| it.scenario() == scenario).cloned().collect();
            assert_eq!(alone(Explorer::new().only(scenario)).findings(), of_all, "{scenario} alone");
        }
        found
    }

    macro_rules! found {
        ($is:expr, $deliver:expr) => {
            found!(Explorer::new(), $is, $deliver)
        };
        ($explorer:expr, $is:expr, $deliver:expr) => {{
            let report = $explorer.explore($deliver);
            let found = scenarios(&report, |explorer| explorer.explore($deliver), $is);
            assert!(!found.is_empty(), "{report}");
            let again = $explorer.explore($deliver);
            assert_eq!(again.findings(), report.findings());
            assert_eq!(again.to_string(), report.to_string(), "two explorations say the same");
            found
        }};
    }

    // ---- Correct handlers ------------------------------------------------------------------------------------------

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn charge_keyed(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("charge")).await?;
        app.worker.checkpoint().await;
        Ok(order)
    }

    #[test]
    fn a_handler_with_a_child_key_passes() {
        let report = explore(|worker| async move { charge_keyed(&App::new(worker), 42).await });
        report.assert_once();
        assert!(report.scenarios() > 150, "{report}");
    }

    #[test]
    fn a_handler_with_a_child_key_passes_with_more_duplicates_and_orders() {
        for seed in 1..=3 {
            let explorer = Explorer::new().seed(seed * 100).orders(3).duplicates(3);
            explorer.explore(|worker| async move { charge_keyed(&App::new(worker), 42).await }).assert_once();
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, in_progress = wait("20s"), lease = "5s", fingerprint = order)]
    async fn charge_ship_and_mail(app: &App, order: u32) -> anyhow::Result<String> {
        app.charge(child_key("charge")).await?;
        let limit = Duration::from_secs(10);
        tokio::time::timeout(limit, app.effect("ship", child_key("ship"))).await??;
        // The sleep is longer than the lease, which is renewed.
        tokio::time::sleep(Duration::from_secs(12)).await;
        let (mail, note) = (app.effect("mail", child_key("mail")), app.effect("note", child_key("note")));
        let (mail, note) = futures::join!(mail, note);
        mail?;
        note?;
        Ok(format!("order {order} is on its way"))
    }

    #[test]
    fn a_handler_with_four_effects_and_a_long_sleep_passes() {
        let report = explore(|worker| async move { charge_ship_and_mail(&App::new(worker), 42).await });
        report.assert_once();
        let effects: BTreeSet<_> = report.effects().iter().map(String::as_str).collect();
        assert_eq!(effects, BTreeSet::from(["charge", "mail", "note", "ship"]));
        assert!(report.store_calls().iter().any(|it| it == "renew"), "{:?}", report.store_calls());
    }

    #[idempotent(key = "nested:{order}", ttl = "7d", store = app.store)]
    async fn outer(app: &App, order: u32) -> anyhow::Result<u32> {
        app.effect("reserve stock", child_key("stock")).await?;
        charge_keyed(app, order).await
    }

    #[test]
    fn handlers_that_call_handlers_pass() {
        explore(|worker| async move { outer(&App::new(worker), 42).await }).assert_once();
    }

    #[derive(Debug, Serialize, Deserialize)]
    enum ChargeError {
        NoAnswer,
        #[serde(skip)]
        Idempotency(#[expect(dead_code, reason = "shown by stories")] Option<Error>),
    }

    impl From<Error> for ChargeError {
        fn from(error: Error) -> Self {
            Self::Idempotency(Some(error))
        }
    }

    impl From<NoAnswer> for ChargeError {
        fn from(_: NoAnswer) -> Self {
            Self::NoAnswer
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, on_crash = fail, on_error = record)]
    async fn charge_at_most_once(app: &App, order: u32) -> Result<u32, ChargeError> {
        app.charge(None).await?;
        Ok(order)
    }

    #[test]
    fn an_at_most_once_handler_passes_only_as_at_most_once() {
        let deliver = |worker| async move { charge_at_most_once(&App::new(worker), 42).await };
        Explorer::new().at_most_once().explore(deliver).assert_once();
        let report = explore(deliver);
        assert!(report.findings().iter().any(|it| *it.problem() == Problem::SetAside), "{report}");
        assert!(report.findings().iter().any(|it| is_missing(it.problem())), "{report}");
        assert!(!report.findings().iter().any(|it| is_repeated(it.problem())), "{report}");
    }

    #[derive(Debug, Serialize, Deserialize)]
    enum Declined {
        Declined,
        Later,
    }

    impl From<Error> for Declined {
        fn from(_: Error) -> Self {
            Self::Later
        }
    }

    fn is_final(error: &Declined) -> OnError {
        if matches!(error, Declined::Declined) { OnError::Record } else { OnError::Release }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, on_error = is_final)]
    async fn declined(app: &App, order: u32) -> Result<u32, Declined> {
        let asked = app.effect("decline the card", child_key("charge")).await;
        Err(if asked.is_ok() { Declined::Declined } else { Declined::Later })
    }

    #[test]
    fn a_handler_that_records_its_error_passes() {
        explore(|worker| async move { declined(&App::new(worker), 42).await }).assert_once();
    }

    async fn consume(app: App) -> Disposition {
        let (_, outcome) = observe(charge_keyed(&app, 42)).await;
        outcome.disposition()
    }

    #[test]
    fn a_consumer_that_follows_the_outcome_passes() {
        explore(|worker| consume(App::new(worker))).assert_once();
    }

    #[test]
    fn a_consumer_with_a_task_for_each_message_passes() {
        explore(
            |worker| async move { tokio::spawn(consume(App::new(worker))).await.expect("the task does not panic") },
        )
        .assert_once();
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = store)]
    async fn charge_dyn(store: &Arc<dyn Store>, worker: &Worker, order: u32) -> std::io::Result<u32> {
        let key = current().expect("an attempt").child_key("charge");
        worker.effect("charge").key(key).await.map_err(std::io::Error::other)?;
        Ok(order)
    }

    #[test]
    fn a_handler_with_a_dyn_store_passes() {
        explore(|worker| async move {
            let store: Arc<dyn Store> = Arc::new(worker.store());
            charge_dyn(&store, &worker, 42).await
        })
        .assert_once();
    }

    // ---- Wrong handlers --------------------------------------------------------------------------------------------

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn charge_before_check(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(None).await?;
        anyhow::ensure!(app.worker.happened("charge").await?);
        Ok(order)
    }

    #[test]
    fn a_charge_before_the_check_whether_it_happened_is_found() {
        let found = found!(is_repeated, |worker| async move { charge_before_check(&App::new(worker), 42).await });
        // At awaits 1 and 2 the handler reserves the key, and at await 3 it requests the charge. From await 4 until the
        // result is recorded, the charge has happened and no record shows it.
        for cut in ["cancel@await:4", "crash@await:4", "crash@await:7", "answer-lost@effect:1", "pause@effect:1"] {
            assert!(found.contains(cut), "{cut} in {found:?}");
        }
        let before = ["crash@await:1", "crash@await:2", "crash@await:3", "cancel@await:3", "request-lost@effect:1"];
        // Before await 4 no charge has happened, and a body whose lease has lapsed is not polled again.
        for harmless in before.into_iter().chain(["stop@await:3", "pause@await:3", "overtake@await:3"]) {
            assert!(!found.contains(harmless), "{harmless} in {found:?}");
        }
    }

    #[test]
    fn a_charge_before_its_check_is_found_in_a_spawned_task() {
        let found = found!(is_repeated, |worker| async move {
            let call = async move { observe(charge_before_check(&App::new(worker), 42)).await.1.disposition() };
            tokio::spawn(call).await.expect("the task does not panic")
        });
        assert!(found.contains("crash@effect:1") && found.contains("down@store:2"), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn check_then_charge(app: &App, order: u32) -> anyhow::Result<u32> {
        if !app.worker.happened("charge").await? {
            app.charge(None).await?;
        }
        Ok(order)
    }

    #[test]
    fn a_check_before_the_charge_prevents_repeated_charges_only_after_crashes() {
        let found = found!(is_repeated, |worker| async move { check_then_charge(&App::new(worker), 42).await });
        assert!(
            found.iter().all(|it| [
                "stop@effect",
                "pause@effect",
                "overtake@effect",
                "late@effect",
                "crash-late@effect"
            ]
            .iter()
            .any(|cut| it.starts_with(cut))),
            "{found:?}"
        );
        assert!(found.contains("late@effect:2") && found.contains("crash-late@effect:2"), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn nothing_left_to_do(app: &App, order: u32) -> anyhow::Result<u32> {
        app.worker.checkpoint().await;
        Ok(order)
    }

    #[test]
    fn an_effect_before_the_reservation_is_found() {
        found!(is_repeated, |worker| async move {
            let app = App::new(worker);
            app.charge(None).await?;
            nothing_left_to_do(&app, 42).await
        });
    }

    #[test]
    fn an_effect_after_the_record_is_found() {
        let deliver = |worker| async move {
            let app = App::new(worker);
            let (result, outcome) = observe(nothing_left_to_do(&app, 42)).await;
            if outcome.executed() && result.is_ok() && app.charge(None).await.is_err() {
                return Disposition::Retry { after: Duration::from_secs(1) };
            }
            outcome.disposition()
        };
        let found = found!(is_missing, deliver);
        assert!(found.contains("crash@await:5"), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn charge_and_forget(app: &Arc<App>, order: u32) -> anyhow::Result<u32> {
        let (app, key) = (Arc::clone(app), child_key("charge"));
        tokio::spawn(async move { app.charge(key).await });
        Ok(order)
    }

    #[test]
    fn an_effect_that_is_never_awaited_is_found() {
        let found =
            found!(is_missing, |worker| async move { charge_and_forget(&Arc::new(App::new(worker)), 42).await });
        assert!(found.contains("crash@ack") && found.contains("crash@return"), "{found:?}");
    }

    #[idempotent(key = "call:{id}", ttl = "7d", store = app.store)]
    async fn charge_under(app: &App, id: u64) -> anyhow::Result<()> {
        Ok(app.charge(child_key("charge")).await?)
    }

    #[test]
    fn a_key_that_differs_for_each_delivery_is_found() {
        found!(is_repeated, |worker: Worker| async move {
            let id = worker.shared::<AtomicU64>().fetch_add(1, Ordering::SeqCst);
            charge_under(&App::new(worker), id).await
        });
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn charge_with_a_key_for_each_attempt(app: &App, order: u32) -> anyhow::Result<u32> {
        let attempt = current().expect("an attempt").number();
        app.charge(Some(format!("{order}:{attempt}"))).await?;
        Ok(order)
    }

    #[test]
    fn an_effect_key_that_differs_for_each_attempt_is_found() {
        found!(is_repeated, |worker| async move { charge_with_a_key_for_each_attempt(&App::new(worker), 42).await });
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn one_key_for_two(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("payment")).await?;
        app.effect("pay the fee", child_key("payment")).await?;
        Ok(order)
    }

    #[test]
    fn one_effect_key_for_two_effects_is_found() {
        found!(|problem| matches!(problem, Problem::KeyShared { .. }), |worker| async move {
            one_key_for_two(&App::new(worker), 42).await
        });
    }

    #[test]
    fn a_lost_lease_that_is_taken_for_success_is_found() {
        let found = found!(is_missing, |worker| async move {
            let (result, outcome) = observe(charge_keyed(&App::new(worker), 42)).await;
            let lost = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Error::LeaseLost { .. }));
            // The mistake: after `LeaseLost` the worker acknowledges the message, as if the other attempt were sure to
            // succeed.
            if result.as_ref().is_err_and(lost) { Disposition::Ack } else { outcome.disposition() }
        });
        assert!(found.iter().all(|it| it.starts_with("overtake@")), "{found:?}");
    }

    #[test]
    fn a_running_attempt_that_is_taken_for_success_is_found() {
        found!(is_missing, |worker| async move {
            let (result, outcome) = observe(charge_keyed(&App::new(worker), 42)).await;
            let runs = |error: &anyhow::Error| matches!(error.downcast_ref(), Some(Error::InProgress { .. }));
            if result.as_ref().is_err_and(runs) { Disposition::Ack } else { outcome.disposition() }
        });
    }

    #[test]
    fn a_message_that_is_never_acknowledged_is_found() {
        let explorer = Explorer::new().max_scenarios(3);
        found!(explorer, |it| *it == Problem::Unacknowledged, |worker| async move {
            let _ = charge_keyed(&App::new(worker), 42).await;
            Disposition::Retry { after: Duration::from_secs(1) }
        });
    }

    #[test]
    fn a_failed_delivery_that_is_acknowledged_is_found() {
        let found = found!(is_missing, |worker| async move {
            let _ = charge_keyed(&App::new(worker), 42).await;
            Disposition::Ack
        });
        assert!(found.contains("request-lost@effect:1") && found.contains("down@store:1"), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn swallow(app: &App, order: u32) -> anyhow::Result<u32> {
        let _ = app.charge(child_key("charge")).await;
        Ok(order)
    }

    #[test]
    fn an_error_that_the_body_ignores_is_found() {
        let found = found!(is_missing, |worker| async move { swallow(&App::new(worker), 42).await });
        assert!(found.contains("request-lost@effect:1"), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "30m", store = app.store)]
    async fn forgets_early(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(None).await?;
        Ok(order)
    }

    #[test]
    fn a_retention_that_is_too_short_is_found() {
        let deliver = |worker| async move { forgets_early(&App::new(worker), 42).await };
        let late = "run/duplicate:late";
        assert!(found!(is_repeated, deliver).contains(late));
        let broker = Explorer::new().redelivered_within(Duration::from_secs(30 * 60));
        assert!(!found!(broker, is_repeated, deliver).contains(late), "the broker gives up before that");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, on_crash = fail)]
    async fn charge_again_after_an_error(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(None).await?;
        Ok(order)
    }

    #[test]
    fn an_error_that_frees_its_key_is_not_at_most_once() {
        let deliver = |worker| async move { charge_again_after_an_error(&App::new(worker), 42).await };
        let found = found!(Explorer::new().at_most_once(), is_repeated, deliver);
        let is_expected = |it: &String| it.starts_with("answer-lost@effect:1") || it.starts_with("late@effect:1");
        assert!(found.iter().all(is_expected), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, on_store_error = run)]
    async fn charge_unprotected(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(None).await?;
        Ok(order)
    }

    #[test]
    fn a_body_that_runs_without_its_store_is_found() {
        let found = found!(is_repeated, |worker| async move { charge_unprotected(&App::new(worker), 42).await });
        assert!(found.iter().any(|it| it.starts_with("down@store:1")), "{found:?}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, max_attempts = 1)]
    async fn charge_in_one_attempt(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("charge")).await?;
        Ok(order)
    }

    #[test]
    fn a_message_that_is_set_aside_is_found() {
        found!(
            |it| *it == Problem::SetAside,
            |worker| async move { charge_in_one_attempt(&App::new(worker), 42).await }
        );
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn waits_for_nothing_on_a_second_attempt(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("charge")).await?;
        if current().is_ok_and(|attempt| attempt.number() > 1) {
            std::future::pending::<()>().await;
        }
        Ok(order)
    }

    #[test]
    fn a_handler_that_hangs_is_found() {
        let explorer = Explorer::new().orders(1).max_scenarios(40);
        found!(explorer, |it| *it == Problem::Stuck, |worker| async move {
            waits_for_nothing_on_a_second_attempt(&App::new(worker), 42).await
        });
    }

    #[test]
    fn a_handler_that_yields_forever_is_found() {
        let report = Explorer::new().max_scenarios(1).explore(|worker| async move {
            charge_keyed(&App::new(worker), 42).await?;
            loop {
                tokio::task::yield_now().await;
                if current().is_ok() {
                    return anyhow::Ok(());
                }
            }
        });
        assert!(report.findings().iter().any(|it| *it.problem() == Problem::Stuck), "{report}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store, timeout = "3h")]
    async fn takes_two_hours(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("charge")).await?;
        tokio::time::sleep(Duration::from_secs(2 * 3600)).await;
        Ok(order)
    }

    #[test]
    fn a_long_handler_passes_with_enough_patience() {
        let deliver = |worker| async move { takes_two_hours(&App::new(worker), 42).await };
        let explorer = Explorer::new().max_scenarios(10);
        assert!(explorer.explore(deliver).findings().iter().any(|it| *it.problem() == Problem::Stuck));
        explorer.patience(Duration::from_secs(12 * 3600)).explore(deliver).assert_once();
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn expects_answers(app: &App, order: u32) -> anyhow::Result<u32> {
        app.charge(child_key("charge")).await.expect("an answer");
        Ok(order)
    }

    #[test]
    fn a_panic_of_the_handler_is_found() {
        let is = |it: &Problem| matches!(it, Problem::Panicked { message } if message.contains("an answer"));
        found!(is, |worker| async move { expects_answers(&App::new(worker), 42).await });
    }

    #[test]
    fn two_results_of_one_operation_are_found() {
        found!(|it| *it == Problem::ResultsDiffer, |worker: Worker| async move {
            let delivery = worker.shared::<AtomicU64>().fetch_add(1, Ordering::SeqCst);
            let app = App::new(worker);
            charge_keyed(&app, 42).await.map(|order| u64::from(order) + delivery)
        });
    }

    #[test]
    fn a_handler_without_effects_is_reported_as_not_checked() {
        let report = explore(|worker| async move { nothing_left_to_do(&App::new(worker), 42).await });
        assert!(report.findings().iter().all(|it| *it.problem() == Problem::NothingCounted), "{report}");
        assert_eq!(report.findings().len(), 1);
    }

    // ---- Reconcilers -----------------------------------------------------------------------------------------------

    /// Answer of a reconciler if the bank has not found the refund.
    #[derive(Clone, Copy)]
    enum NotFound {
        NotDone,
        Unknown,
        /// The reconciler waits until each earlier request has expired, and only then asks the bank.
        NotDoneAfterExpiry,
    }

    const EXPIRY: Duration = Duration::from_secs(600);

    struct Bank {
        worker: Worker,
        /// True if the bank refuses the second request with a reference.
        refuses_twice: bool,
        not_found: NotFound,
        /// For each reconciler, its number of steps; a reconciler that has answered has made three steps.
        reached: Arc<Mutex<Vec<u32>>>,
    }

    /// Counts the steps of a reconciler, until it answers or is dropped.
    struct Steps<'a>(&'a Mutex<Vec<u32>>, u32);

    impl Drop for Steps<'_> {
        fn drop(&mut self) {
            self.0.lock().unwrap().push(self.1);
        }
    }

    #[idempotent(
        key = "refund:{order}", ttl = "7d", store = bank.worker.store(), on_error = uncertain,
        on_crash = reconcile(find_refund(bank, order))
    )]
    async fn refund(bank: &Bank, order: u32) -> anyhow::Result<u32> {
        let request = bank.worker.effect("refund");
        let request = if bank.refuses_twice { request.key(current()?.child_key("refund")) } else { request };
        match bank.not_found {
            NotFound::NotDoneAfterExpiry => request.expires_after(EXPIRY).await?,
            _ => request.await?,
        };
        Ok(order)
    }

    async fn find_refund(bank: &Bank, order: u32) -> anyhow::Result<Reconciliation<u32>> {
        let mut steps = Steps(&bank.reached, 0);
        bank.worker.checkpoint().await;
        if let NotFound::NotDoneAfterExpiry = bank.not_found {
            tokio::time::sleep(EXPIRY).await;
        }
        steps.1 = 1;
        let found = bank.worker.happened("refund").await?;
        steps.1 = 2;
        bank.worker.checkpoint().await;
        steps.1 = 3;
        Ok(match (found, bank.not_found) {
            (true, _) => Reconciliation::Done(order),
            (false, NotFound::Unknown) => Reconciliation::Unknown { ask_again: Duration::from_secs(60) },
            (false, _) => Reconciliation::NotDone,
        })
    }

    /// Explores a refund. Also returns the numbers of steps that its reconcilers have reached.
    fn explored(explorer: &Explorer, refuses_twice: bool, not_found: NotFound) -> (Report, Vec<u32>) {
        let reached: Arc<Mutex<Vec<u32>>> = Arc::default();
        let report = explorer.explore({
            let reached = Arc::clone(&reached);
            move |worker| {
                let bank = Bank { worker, refuses_twice, not_found, reached: Arc::clone(&reached) };
                async move { refund(&bank, 42).await }
            }
        });
        let reached = std::mem::take(&mut *reached.lock().unwrap());
        (report, reached)
    }

    #[test]
    fn a_reconciler_that_takes_not_found_for_not_done_is_found() {
        let (report, _) = explored(&Explorer::new(), false, NotFound::NotDone);
        let twice = Problem::FalseNotDone { step: None, effect: "refund".into(), times: 2, expected: 1 };
        let found: Vec<_> = report.findings().iter().map(|it| (it.scenario(), it.problem())).collect();
        for scenario in ["late@effect:1", "crash-late@effect:1", "late@effect:1/order:1", "stop@effect:1"] {
            assert!(found.contains(&(scenario, &twice)), "{scenario}: {report}");
        }
        assert!(found.iter().all(|(_, problem)| **problem == twice), "{report}");
        let text = report.to_string();
        let sentence = "`refund` happened twice, not once: the reconciler answered NotDone, and an earlier request had";
        assert!(text.contains(sentence), "{text}");
        let (alone, _) = explored(&Explorer::new().only("crash-late@effect:1"), false, NotFound::NotDone);
        assert_eq!(alone.findings().len(), 1);
        assert!(alone.to_string().contains("refund:42 as attempt 2, and asks its reconciler"), "{alone}");
    }

    #[test]
    fn a_reconciler_whose_bank_refuses_a_second_request_passes() {
        explored(&Explorer::new(), true, NotFound::NotDone).0.assert_once();
        explored(&Explorer::new().twice(), true, NotFound::NotDone).0.assert_once();
    }

    #[test]
    fn a_reconciler_that_waits_for_the_expiry_of_earlier_requests_passes() {
        explored(&Explorer::new(), false, NotFound::NotDoneAfterExpiry).0.assert_once();
    }

    #[test]
    fn a_reconciler_that_does_not_know_leaves_the_doubt_to_an_operator() {
        explored(&Explorer::new().at_most_once(), false, NotFound::Unknown).0.assert_once();
        let (report, _) = explored(&Explorer::new(), false, NotFound::Unknown);
        assert!(report.findings().iter().all(|it| is_missing(it.problem()) || *it.problem() == Problem::SetAside));
        // A late request settles the doubt: the reconciler is asked again, and then the bank has found the refund.
        assert!(!report.findings().iter().any(|it| it.scenario() == "answer-lost@effect:1"), "{report}");
    }

    #[test]
    fn a_delivery_is_killed_at_each_await_of_its_reconciler() {
        let (report, reached) = explored(&Explorer::new(), true, NotFound::NotDone);
        report.assert_once();
        let killed = [0, 1, 2].map(|step| reached.iter().filter(|it| **it == step).count());
        // Each of these leaves a doubt: the crash, the two lost messages, and the two late requests, in two orders
        // each. In each of the seven scenarios, the delivery is cancelled or killed at each of the reconciler's four
        // awaits. The question has two of them.
        assert_eq!(killed, [7 * 2, 7 * 2 * 2, 7 * 2], "{report}");
        let alone = Explorer::new().only("late@effect:1/crash@await:4");
        let (_, reached) = explored(&alone, true, NotFound::NotDone);
        assert_eq!(reached.iter().filter(|step| **step == 1).count(), 1, "killed in its question: {reached:?}");
    }

    // ---- Steps -----------------------------------------------------------------------------------------------------

    impl App {
        /// Makes an effect in a step of the same name, with the child key of the step if `keyed`.
        async fn step(&self, name: &'static str, keyed: bool) -> anyhow::Result<()> {
            let step = current()?.step(name);
            step.run(async |step| Ok(self.effect(name, keyed.then(|| step.child_key())).await?)).await
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn fulfil(app: &App, order: u32, unkeyed: Option<&'static str>) -> anyhow::Result<u32> {
        for name in ["charge", "reserve", "book"] {
            app.step(name, unkeyed != Some(name)).await?;
        }
        Ok(order)
    }

    #[test]
    fn a_handler_whose_steps_hand_out_their_child_keys_passes() {
        let report = explore(|worker| async move { fulfil(&App::new(worker), 42, None).await });
        report.assert_once();
        assert_eq!(report.store_calls(), ["reserve", "append", "append", "append", "finish"]);
        let appends = report.awaits().iter().filter(|it| it.contains("`append`")).count();
        assert_eq!(appends, 6, "a delivery is cut before and after each write of the journal");
        let explorer = Explorer::new().twice().duplicates(2);
        explorer.explore(|worker| async move { fulfil(&App::new(worker), 42, None).await }).assert_once();
    }

    /// Step in which `problem` repeats its only effect.
    fn step_of(problem: &Problem) -> Option<&str> {
        match problem {
            Problem::StepRepeated { step, .. } => Some(step),
            _ => None,
        }
    }

    #[test]
    fn a_step_without_its_child_key_is_found_by_its_name() {
        for unkeyed in ["charge", "reserve", "book"] {
            let deliver = move |worker| async move { fulfil(&App::new(worker), 42, Some(unkeyed)).await };
            let report = explore(deliver);
            let found = scenarios(&report, |explorer| explorer.explore(deliver), |it| step_of(it).is_some());
            let problems: Vec<_> = report.findings().iter().map(|it| step_of(it.problem())).collect();
            assert!(problems.iter().all(|it| *it == Some(unkeyed)), "{report}");
            let sentence = format!("`{unkeyed}` happened twice, not once: step `{unkeyed}` ran again without its key");
            assert!(report.to_string().contains(&sentence), "{report}");
            // The step runs again if its attempt ends between the effect and the journal entry, however it ends.
            let effect = 1 + ["charge", "reserve", "book"].iter().position(|it| *it == unkeyed).unwrap();
            let (append, cut) = (1 + effect, 3 * effect + effect);
            for scenario in [
                format!("crash@effect:{effect}"),
                format!("answer-lost@effect:{effect}"),
                format!("down@store:{append}/duplicate:after"),
                format!("crash@await:{cut}"),
                format!("cancel@await:{cut}"),
                format!("stop@await:{cut}"),
            ] {
                assert!(found.contains(&scenario), "{scenario} in {found:?}");
            }
            // Once the entry is in the store, no attempt runs the step again.
            for scenario in [
                format!("crash@store:{append}"),
                format!("answer-lost@store:{append}"),
                format!("crash@await:{}", cut + 2),
                format!("cancel@await:{}", cut + 2),
            ] {
                assert!(!found.contains(&scenario), "{scenario} in {found:?}");
            }
        }
    }

    #[test]
    fn the_story_of_a_step_shows_its_journal_entry() {
        let report = Explorer::new()
            .only("answer-lost@effect:3")
            .explore(|worker| async move { fulfil(&App::new(worker), 42, Some("book")).await });
        let text = report.to_string();
        assert!(text.contains("step `charge` is journaled (worker 1, attempt 1)"), "{text}");
        assert!(text.contains("fulfil/order:42 as attempt 2, after step `charge`, `reserve`"), "{text}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn three_steps(app: &App, order: u32, ran: &Mutex<Vec<u32>>) -> anyhow::Result<u32> {
        let attempt = current()?;
        for n in 1..=3 {
            let step = attempt.step(("step", n));
            step.run(async |step| {
                ran.lock().unwrap().push(n);
                anyhow::Ok(app.effect(&format!("effect {n}"), Some(step.child_key())).await?)
            })
            .await?;
        }
        app.worker.checkpoint().await;
        Ok(order)
    }

    #[test]
    fn an_attempt_after_a_crash_continues_after_the_journaled_steps() {
        let ran: Arc<Mutex<Vec<u32>>> = Arc::default();
        let explored = |explorer: Explorer| {
            let ran = Arc::clone(&ran);
            explorer.explore(move |worker| {
                let ran = Arc::clone(&ran);
                async move { three_steps(&App::new(worker), 42, &ran).await }
            })
        };
        let report = explored(Explorer::new());
        report.assert_once();
        // For each await at which the first delivery ends: the number of steps whose bodies have begun before, and the
        // number of steps whose entries the store has.
        let places = report.awaits().iter().scan((0_u32, 0_u32), |(begun, journaled), place| {
            *begun += u32::from(place.starts_with("before effect"));
            *journaled += u32::from(place.starts_with("after `append`"));
            Some((place.clone(), *begun, *journaled))
        });
        let places: Vec<_> = places.collect();
        assert_eq!(places.last().map(|it| (it.1, it.2)), Some((3, 3)), "{report}");
        for (at, (place, begun, journaled)) in places.into_iter().enumerate() {
            for cut in ["crash", "cancel"] {
                ran.lock().unwrap().clear();
                let alone = explored(Explorer::new().only(format!("{cut}@await:{}", at + 1)));
                alone.assert_once();
                let ran = std::mem::take(&mut *ran.lock().unwrap());
                // The explorer first plays the scenario without a fault.
                let recorded = place.contains("`finish`") && place.starts_with("after");
                let second = if recorded { 4..4 } else { 1 + journaled..4 };
                let expected: Vec<u32> = (1..=begun).chain(second).collect();
                assert!(ran.ends_with(&expected), "{cut} {place}: {expected:?} in {ran:?}");
                assert_eq!(ran[..ran.len() - expected.len()], [1, 2, 3], "{cut} {place}: {expected:?} in {ran:?}");
            }
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn charge_outside_of_the_step(app: &App, order: u32, asks: bool) -> anyhow::Result<u32> {
        if !asks || !app.worker.happened("charge").await? {
            app.charge(None).await?;
        }
        app.step("book", true).await?;
        Ok(order)
    }

    #[test]
    fn an_effect_outside_of_the_steps_is_found_without_a_step() {
        for asks in [false, true] {
            let deliver = move |worker| async move { charge_outside_of_the_step(&App::new(worker), 42, asks).await };
            let found = found!(is_repeated, deliver);
            let report = explore(deliver);
            assert!(report.findings().iter().all(|it| is_repeated(it.problem())), "{report}");
            assert!(report.to_string().contains("`charge` happened twice, not once, outside of a step"), "{report}");
            // The journal entry of the step after the charge prevents no repetition.
            assert_eq!(found.contains("crash@store:2"), !asks, "{found:?}");
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn fulfil_in_tasks(app: &Arc<App>, order: u32, together: bool) -> anyhow::Result<u32> {
        let attempt = current()?;
        let book = |n: u32| {
            let (app, step) = (Arc::clone(app), attempt.step(("book", n)));
            async move {
                step.run(async |step| anyhow::Ok(app.effect("parcel", (n != 2).then(|| step.child_key())).await?)).await
            }
        };
        if together {
            let (one, two, three) = futures::join!(book(1), book(2), book(3));
            one.and(two).and(three)?;
        } else {
            let tasks: Vec<_> = (1..=3).map(|n| tokio::spawn(book(n))).collect();
            for task in tasks {
                task.await??;
            }
        }
        Ok(order)
    }

    #[test]
    fn of_concurrent_steps_the_one_without_its_key_is_found() {
        for together in [true, false] {
            let deliver = move |worker| async move { fulfil_in_tasks(&Arc::new(App::new(worker)), 42, together).await };
            let report = explore(deliver);
            let steps: BTreeSet<_> = report.findings().iter().map(|it| step_of(it.problem())).collect();
            assert_eq!(steps, BTreeSet::from([Some("book[2]")]), "{report}");
        }
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn one_name_for_two_effects(app: &App, order: u32) -> anyhow::Result<u32> {
        for n in 1..=2 {
            current()?.step(("mail", n)).run(async |_| anyhow::Ok(app.effect("mail", None).await?)).await?;
        }
        Ok(order)
    }

    #[test]
    fn an_effect_of_two_steps_is_found_in_the_step_that_ran_again() {
        let report = explore(|worker| async move { one_name_for_two_effects(&App::new(worker), 42).await });
        let steps: BTreeSet<_> = report.findings().iter().map(|it| step_of(it.problem())).collect();
        assert_eq!(steps, BTreeSet::from([Some("mail[1]"), Some("mail[2]")]), "{report}");
        assert!(
            report.to_string().contains("`mail` happened 3 times, not twice: step `mail[1]` ran again"),
            "{report}"
        );
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store(), scope = "shop::fulfil")]
    async fn fulfil_of_the_documents(worker: &Worker, order: u32) -> Result<u32, Error> {
        let attempt = current()?;
        let charge = worker.effect("charge order 42");
        attempt
            .step("charge")
            .run(async |step| charge.key(step.child_key()).await.map_err(|_| Error::NoAttempt))
            .await?;
        let parcel = worker.effect("parcel of order 42");
        attempt.step("book").run(async |_| parcel.await.map_err(|_| Error::NoAttempt)).await?;
        Ok(order)
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store(), scope = "charge")]
    async fn charge_of_the_documents(worker: &Worker, order: u32) -> std::io::Result<u32> {
        worker.effect("charge 42").await.map_err(std::io::Error::other)?;
        Ok(order)
    }

    #[test]
    fn the_reports_in_the_documents_are_those_of_explore() {
        let of_steps = explore(|worker| async move { fulfil_of_the_documents(&worker, 42).await });
        let of_guide = explore(|worker| async move { charge_of_the_documents(&worker, 42).await });
        let steps = include_str!("../docs/steps.md");
        let guide = include_str!("../docs/guide.md");
        for (report, document) in [(of_steps, steps), (of_guide, guide)] {
            let shown = document.split("```text\nEFFECT REPEATED").nth(1).unwrap().split("```").next().unwrap();
            assert!(report.to_string().contains(&format!("EFFECT REPEATED{shown}")), "{report}");
        }
    }

    // ---- Steps in doubt --------------------------------------------------------------------------------------------

    /// Mistake in a handler whose steps may be in doubt.
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum StepMistake {
        /// The handler is right.
        None,
        /// The reconciler asks the carrier while the carrier may still accept an earlier request.
        AsksTooEarly,
        /// The reconciler does not ask.
        AsksNever,
        /// The errors of the two bodies count as certain.
        CertainErrors,
        /// The letter is sent before its step.
        OutsideOfStep,
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn ship(app: &App, order: u32, mistake: StepMistake, reached: &Mutex<Vec<u32>>) -> anyhow::Result<String> {
        let attempt = current()?;
        app.step("charge", true).await?;
        let is_uncertain = |_: &anyhow::Error| mistake != StepMistake::CertainErrors;
        let book = attempt.step("book").reconcile(async |_| find_parcel(app, order, mistake, reached).await);
        let book = book.uncertain_errors_if(is_uncertain).run(async |_| {
            app.worker.effect("parcel").expires_after(EXPIRY).await?;
            Ok(format!("parcel of order {order}"))
        });
        let parcel = book.await?;
        if mistake == StepMistake::OutsideOfStep {
            app.effect("letter", None).await?;
        }
        let letter = attempt.step("letter").irreversible().uncertain_errors_if(is_uncertain).fail();
        letter
            .run(async |_| match mistake {
                StepMistake::OutsideOfStep => Ok(()),
                _ => anyhow::Ok(app.effect("letter", None).await?),
            })
            .await?;
        Ok(parcel)
    }

    async fn find_parcel(
        app: &App,
        order: u32,
        mistake: StepMistake,
        reached: &Mutex<Vec<u32>>,
    ) -> anyhow::Result<Reconciliation<String>> {
        let mut steps = Steps(reached, 0);
        app.worker.checkpoint().await;
        if mistake != StepMistake::AsksTooEarly {
            tokio::time::sleep(EXPIRY).await;
        }
        steps.1 = 1;
        let found = mistake != StepMistake::AsksNever && app.worker.happened("parcel").await?;
        steps.1 = 2;
        app.worker.checkpoint().await;
        steps.1 = 3;
        Ok(if found { Reconciliation::Done(format!("parcel of order {order}")) } else { Reconciliation::NotDone })
    }

    /// Explores a shipment. Also returns the numbers of steps that the reconcilers of `book` have reached.
    fn shipped(explorer: &Explorer, mistake: StepMistake) -> (Report, Vec<u32>) {
        let reached: Arc<Mutex<Vec<u32>>> = Arc::default();
        let report = explorer.explore({
            let reached = Arc::clone(&reached);
            move |worker| {
                let reached = Arc::clone(&reached);
                async move { ship(&App::new(worker), 42, mistake, &reached).await }
            }
        });
        let reached = std::mem::take(&mut *reached.lock().unwrap());
        (report, reached)
    }

    /// Explores a shipment with a mistake, and checks that each finding is this kind of problem. Returns the report.
    fn found_in_shipment(mistake: StepMistake, is: fn(&Problem) -> bool) -> Report {
        let (report, _) = shipped(&Explorer::new(), mistake);
        let found = scenarios(&report, |explorer| shipped(&explorer, mistake).0, is);
        assert!(!found.is_empty() && report.findings().iter().all(|it| is(it.problem())), "{report}");
        report
    }

    #[test]
    fn a_handler_with_steps_under_fail_and_reconcile_passes() {
        let (report, reached) = shipped(&Explorer::new(), StepMistake::None);
        report.assert_once();
        let killed = [0, 1, 2].map(|step| reached.iter().filter(|it| **it == step).count());
        // Each of these leaves the parcel in doubt: the crash, the two lost messages, and the two late requests, in two
        // orders each. In each of these scenarios, the delivery is cancelled or killed at each await of the reconciler:
        // at the first checkpoint and in the sleep, in the question, which has two awaits, and at the last checkpoint.
        assert_eq!(killed, [7 * 2 * 2, 7 * 2 * 2, 7 * 2], "{report}");
    }

    #[test]
    fn a_step_whose_reconciler_asks_too_early_is_found_by_its_name() {
        let is = |it: &Problem| matches!(it, Problem::FalseNotDone { step: Some(step), .. } if step == "book");
        let report = found_in_shipment(StepMistake::AsksTooEarly, is);
        let found: BTreeSet<_> = report.findings().iter().map(idem_runtime::testing::Finding::scenario).collect();
        for scenario in ["late@effect:2", "crash-late@effect:2", "late@effect:2/order:1", "stop@effect:2"] {
            assert!(found.contains(scenario), "{scenario}: {report}");
        }
        assert!(!found.contains("crash@effect:2"), "{report}");
        let sentence = "EFFECT REPEATED: `parcel` happened twice, not once: the reconciler of step `book` answered NotDone, \
                        and an earlier request had its effect";
        assert!(report.to_string().contains(sentence), "{report}");
        let (alone, _) = shipped(&Explorer::new().only("crash-late@effect:2"), StepMistake::AsksTooEarly);
        assert!(alone.to_string().contains("as attempt 2, after step `charge`, with step `book` in doubt"), "{alone}");
    }

    #[test]
    fn a_step_whose_reconciler_does_not_ask_is_found_by_its_name() {
        let is = |it: &Problem| matches!(it, Problem::FalseNotDone { step: Some(step), .. } if step == "book");
        let report = found_in_shipment(StepMistake::AsksNever, is);
        assert!(report.findings().iter().any(|it| it.scenario() == "crash@effect:2"), "{report}");
    }

    #[test]
    fn an_uncertain_error_that_a_step_takes_for_certain_is_found() {
        let is = |it: &Problem| matches!(it, Problem::CertainError { .. });
        let report = found_in_shipment(StepMistake::CertainErrors, is);
        for (effect, step) in [("parcel", "book"), ("letter", "letter")] {
            let sentence = format!(
                "`{effect}` happened twice, not once: the body of step `{step}` returned an error that counts as certain"
            );
            assert!(report.to_string().contains(&sentence), "{report}");
        }
        let found: BTreeSet<_> = report.findings().iter().map(idem_runtime::testing::Finding::scenario).collect();
        for effect in [2, 3] {
            assert!(found.contains(&*format!("late@effect:{effect}")), "{report}");
            assert!(found.contains(&*format!("answer-lost@effect:{effect}")), "{report}");
            assert!(!found.contains(&*format!("request-lost@effect:{effect}")), "{report}");
        }
    }

    #[test]
    fn an_effect_before_its_step_under_fail_is_found() {
        let is =
            |it: &Problem| matches!(it, Problem::Repeated { effect, outside_of_steps: true, .. } if effect == "letter");
        let report = found_in_shipment(StepMistake::OutsideOfStep, is);
        assert!(report.to_string().contains("`letter` happened twice, not once, outside of a step"), "{report}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn two_letters_in_a_step(app: &App, order: u32) -> anyhow::Result<u32> {
        let letters = current()?.step("letters").irreversible().fail();
        letters
            .run(async |_| {
                app.effect("letter", None).await?;
                anyhow::Ok(app.effect("copy", None).await?)
            })
            .await?;
        Ok(order)
    }

    #[test]
    fn a_step_under_fail_with_two_effects_is_found() {
        let deliver = |worker| async move { two_letters_in_a_step(&App::new(worker), 42).await };
        let found = found!(|it| *it == Problem::SetAside, deliver);
        // No decision is true after the first of two effects.
        assert!(found.contains("crash@effect:1") && !found.contains("crash@effect:2"), "{found:?}");
        let alone = Explorer::new().only("crash@effect:1").explore(deliver).to_string();
        assert!(alone.contains("the operator can't decide about step `letters`"), "{alone}");
    }

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn expects_to_send(app: &App, order: u32) -> anyhow::Result<u32> {
        let mut is_sent = false;
        let letter = current()?.step("letter").irreversible().fail();
        letter
            .run(async |_| {
                is_sent = true;
                anyhow::Ok(app.effect("letter", None).await?)
            })
            .await?;
        if !is_sent {
            app.effect("an operator has sent the letter", None).await?;
        }
        Ok(order)
    }

    #[test]
    fn the_story_of_a_step_in_doubt_shows_the_decision_of_the_operator() {
        let explorer = Explorer::new().only("crash@effect:1");
        let report = explorer.explore(|worker| async move { expects_to_send(&App::new(worker), 42).await });
        let story = report.to_string();
        for line in [
            "the beginning of step `letter` is journaled (worker 1, attempt 1)",
            "effect `letter` happens (worker 1, attempt 1, step `letter`)",
            "as attempt 2, with step `letter` in doubt",
            "the operator decides about step `letter` of ",
            ": its effect has happened",
            ": the message, which was set aside, to worker 3",
            "effect `an operator has sent the letter` happens (worker 3, attempt 3)",
        ] {
            assert!(story.contains(line), "{line}: {story}");
        }
    }

    // ---- The scenarios ---------------------------------------------------------------------------------------------

    #[idempotent(key = "order:{order}", ttl = "7d", store = app.store)]
    async fn steps(app: &App, order: u32, reached: &Mutex<Vec<u32>>) -> anyhow::Result<u32> {
        let reach = |step| reached.lock().unwrap().push(step);
        reach(0);
        tokio::task::yield_now().await;
        reach(1);
        app.charge(child_key("charge")).await?;
        reach(2);
        tokio::time::sleep(Duration::from_secs(1)).await;
        reach(3);
        app.worker.checkpoint().await;
        reach(4);
        Ok(order)
    }

    #[test]
    fn a_delivery_is_interrupted_at_each_of_its_awaits() {
        let reached: Arc<Mutex<Vec<u32>>> = Arc::default();
        let explored = |explorer: Explorer| {
            let reached = Arc::clone(&reached);
            explorer.explore(move |worker| {
                let reached = Arc::clone(&reached);
                async move { steps(&App::new(worker), 42, &reached).await }
            })
        };
        let report = explored(Explorer::new());
        report.assert_once();
        let expected = [
            "before `reserve` reaches the store",
            "after `reserve`, before the store's answer arrives",
            "at an await of its own",
            "before effect `charge`",
            "after effect `charge`",
            "at an await of its own",
            "at a checkpoint",
            "before `finish` reaches the store",
            "after `finish`, before the store's answer arrives",
        ];
        assert_eq!(report.awaits(), expected);
        assert_eq!(report.store_calls(), ["reserve", "finish"]);
        assert_eq!(report.effects(), ["charge"]);
        // For each await at which the first run is cancelled, the number of steps that this run reaches. The second run
        // reaches all steps, or none if the first run has recorded its result.
        for (at, steps) in [0, 0, 1, 2, 2, 3, 4, 5, 5].into_iter().enumerate() {
            reached.lock().unwrap().clear();
            explored(Explorer::new().only(format!("cancel@await:{}", at + 1))).assert_once();
            let mut seen = std::mem::take(&mut *reached.lock().unwrap());
            // `explore` plays one scenario without a fault first.
            assert_eq!(seen.drain(..5).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
            let recorded = at >= 7;
            let first: Vec<u32> = (0..steps).collect();
            let second: Vec<u32> = if recorded { vec![] } else { (0..5).collect() };
            assert_eq!(seen, [first, second].concat(), "cancelled at await {}", at + 1);
        }
    }

    #[test]
    fn under_the_option_twice_a_second_delivery_is_interrupted_too() {
        let explorer = Explorer::new().twice();
        let report = explorer.explore(|worker| async move { charge_keyed(&App::new(worker), 42).await });
        report.assert_once();
        let once = explore(|worker| async move { charge_keyed(&App::new(worker), 42).await });
        assert_eq!(report.scenarios(), once.scenarios() + 14 * 14, "cancelled and killed at seven awaits, twice");

        let report = explorer.explore(|worker| async move { charge_before_check(&App::new(worker), 42).await });
        let found = |scenario| report.findings().iter().any(|it| it.scenario() == scenario);
        assert!(!found("cancel@await:3"), "nothing has happened at await 3");
        assert!(found("cancel@await:3/crash@await:4"), "the scenario at await 4 of the next delivery is found");
        let thrice = Problem::Repeated { effect: "charge".into(), times: 3, expected: 1, outside_of_steps: false };
        assert!(report.findings().iter().any(|it| *it.problem() == thrice));
    }

    #[test]
    fn the_report_counts_the_scenarios_that_the_limit_left_out() {
        let deliver = |worker| async move { charge_keyed(&App::new(worker), 42).await };
        let all = explore(deliver);
        let report = Explorer::new().max_scenarios(20).explore(deliver);
        assert_eq!((report.scenarios(), report.left_out()), (20, all.scenarios() - 20));
        assert!(report.to_string().contains("more were left out"), "{report}");
    }

    #[test]
    #[should_panic(
        expected = "there is no scenario `crash@await:99` for a handler with 7 awaits, 2 store calls and 1 effect"
    )]
    fn an_unknown_scenario_is_refused() {
        let explorer = Explorer::new().only("crash@await:99");
        let _ = explorer.explore(|worker| async move { charge_keyed(&App::new(worker), 42).await });
    }

    #[test]
    #[should_panic(expected = "EFFECT REPEATED: `charge` happened twice, not once")]
    fn assert_once_panics_with_the_history_of_a_finding() {
        explore(|worker| async move { charge_before_check(&App::new(worker), 42).await }).assert_once();
    }
}

mod messages {
    use idem_runtime::outbox::{OutgoingMessage, Sender as _};
    use idem_runtime::testing::{Explorer, Problem, Worker, explore};
    use idem_runtime::{Error, current, idempotent};

    #[derive(Debug)]
    enum PayError {
        NoAnswer,
        Call(#[allow(dead_code, reason = "a story shows it")] Error),
    }

    impl From<Error> for PayError {
        fn from(error: Error) -> Self {
            Self::Call(error)
        }
    }

    /// Publishes three messages, two of them for one destination.
    #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
    async fn pay(worker: &Worker, order: u32) -> Result<u32, PayError> {
        let attempt = current()?;
        let charge = worker.effect("charge").key(attempt.child_key("charge"));
        let outbox = attempt.outbox();
        outbox.push("orders", OutgoingMessage::new("paid"))?;
        outbox.push("mail", OutgoingMessage::new("receipt"))?;
        charge.await.map_err(|_| PayError::NoAnswer)?;
        outbox.push("orders", OutgoingMessage::new("packed"))?;
        Ok(order)
    }

    /// Publishes in its body. `with_child_key`: the id of the message is the same in each attempt.
    #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
    async fn publish(worker: &Worker, order: u32, with_child_key: bool) -> std::io::Result<u32> {
        let attempt = current().map_err(std::io::Error::other)?;
        let id = if with_child_key { attempt.child_key("paid") } else { format!("{order}-{}", attempt.number()) };
        let paid = OutgoingMessage::new("paid").addressed("orders", id);
        let sent = worker.sender().send(&paid).await;
        sent.map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(order)
    }

    /// Publishes another content in each attempt, with one id.
    #[idempotent(key = "order:{order}", ttl = "7d", store = worker.store())]
    async fn publish_other_content(worker: &Worker, order: u32) -> std::io::Result<u32> {
        let attempt = current().map_err(std::io::Error::other)?;
        let body = format!("attempt {}", attempt.number());
        let paid = OutgoingMessage::new(body).addressed("orders", attempt.child_key("paid"));
        let sent = worker.sender().send(&paid).await;
        sent.map_err(|error| std::io::Error::other(error.to_string()))?;
        Ok(order)
    }

    #[test]
    fn a_handler_with_the_outbox_is_cut_at_each_sending_and_sends_each_message_once() {
        let report = explore(|worker| async move { pay(&worker, 42).await });
        report.assert_once();
        let sent = ["message for `orders`", "message for `mail`", "message for `orders`"];
        assert_eq!(report.effects(), [&["charge"], &sent[..]].concat());
        for point in ["before message for `orders`", "after message for `mail`", "before `mark_sent` reaches the store"]
        {
            assert!(report.awaits().iter().any(|place| place == point), "{point}: {:?}", report.awaits());
        }
        let alone = |scenario| Explorer::new().only(scenario).explore(|worker| async move { pay(&worker, 42).await });
        for scenario in
            ["crash@effect:2", "answer-lost@effect:3", "late@effect:4", "stop@effect:2", "crash-late@effect:4"]
        {
            alone(scenario).assert_once();
        }
    }

    #[test]
    fn a_handler_that_publishes_in_its_body_sends_another_message_after_a_crash() {
        let report = explore(|worker| async move { publish(&worker, 42, false).await });
        let repeated: Vec<_> = report.findings().iter().map(idem_runtime::testing::Finding::problem).collect();
        let is_repeated = |it: &&Problem| matches!(it, Problem::MessageRepeated { times: 2, expected: 1, .. });
        assert!(repeated.iter().any(is_repeated), "{repeated:?}");
        let only =
            |it: &&Problem| matches!(it, Problem::MessageRepeated { destination, .. } if destination == "orders");
        assert!(repeated.iter().all(only), "{repeated:?}");
        let text = "MESSAGE REPEATED: 2 messages with different ids arrived for `orders`, not 1";
        assert!(report.to_string().contains(text), "{report}");
        explore(|worker| async move { publish(&worker, 42, true).await }).assert_once();
    }

    #[test]
    fn a_handler_whose_messages_differ_under_one_id_is_found() {
        let report = explore(|worker| async move { publish_other_content(&worker, 42).await });
        let is_shared =
            |it: &Problem| matches!(it, Problem::MessageIdShared { destination } if destination == "orders");
        assert!(report.findings().iter().any(|finding| is_shared(finding.problem())), "{report}");
    }
}
