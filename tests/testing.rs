//! The simulation that users test their handlers with: does it find what it is for, and nothing else?

mod simulation {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;
    use std::time::Duration;

    use idem_runtime::testing::Simulation;
    use idem_runtime::{Clock, Error, MemoryStore, Outcome, idempotent, observe};

    const MINUTE: Duration = Duration::from_secs(60);

    /// Three tasks that note their turns.
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
    fn a_seed_repeats_its_order() {
        assert_eq!(turns(7), turns(7));
        let different: std::collections::BTreeSet<_> = (0..20).map(turns).collect();
        assert!(different.len() > 15, "seeds draw different orders, not {different:?}");
    }

    #[test]
    fn tasks_of_the_runtime_come_in_between() {
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
    fn time_passes_while_nobody_can_go_on() {
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
    fn a_jump_of_time_makes_everything_due() {
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
    fn who_waits_for_nothing_is_found_out() {
        let simulation = Simulation::new(9);
        let stuck = simulation.try_run(std::future::pending::<()>()).unwrap_err();
        assert!(!stuck.is_spinning());
        assert_eq!(stuck.after(), Duration::from_secs(24 * 3600));
        assert!(stuck.to_string().contains("seed 9"), "{stuck}");

        simulation.limit_polls(1000);
        let spinning = async {
            loop {
                tokio::task::yield_now().await;
            }
        };
        let stuck = simulation.try_run(async { spinning.await }).map(|()| ()).unwrap_err();
        assert!(stuck.is_spinning());
        // It goes on being of use.
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
    fn a_task_is_dropped_at_the_await_it_is_killed_at() {
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
            // Three awaits: at the fourth poll it is ready, and no kill comes in time.
            assert_eq!(output, killed_at.min(4), "polls of one killed at {killed_at}");
            assert_eq!(polls.get(), killed_at.min(4));
            assert_eq!(seen.is_ok(), killed_at > 3, "{seen:?}");
            assert_eq!(drops.get(), 1);
        }
    }

    #[test]
    fn tasks_can_be_killed_by_others_and_by_themselves() {
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
    fn what_is_left_is_dropped_with_the_run() {
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

    /// Ten deliveries of one message, some of them killed, to workers of their own; how each of them ended, and when.
    fn deliveries(seed: u64) -> Vec<(Option<Outcome>, Duration)> {
        let simulation = Simulation::new(seed);
        let clock = simulation.clock();
        let store = MemoryStore::with_clock(clock.clone());
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
    fn the_engine_lives_on_simulated_time() {
        for seed in 0..50 {
            let ended = deliveries(seed);
            assert_eq!(ended, deliveries(seed), "seed {seed} repeats");
            let executed = ended.iter().flat_map(|(outcome, _)| outcome).filter(|it| it.executed()).count();
            assert!(executed == 1, "seed {seed}: {ended:?}");
            // The lease of 30 s is renewed all the while, so nobody takes over.
            assert!(ended.iter().flat_map(|(outcome, _)| outcome).all(|it| !it.took_over()), "seed {seed}: {ended:?}");
        }
    }
}
