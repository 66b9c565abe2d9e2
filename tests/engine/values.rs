//! The values of a body are dropped before its key is freed (S17), on every way out of a call.

use std::panic::{AssertUnwindSafe, catch_unwind};

use futures::FutureExt as _;
use idem_runtime::store::Inspection;
use idem_tests::clock::OddClock;
use tokio::sync::Notify;

use super::super::*;

/// Value of a body. The drop of the guard notes the key's record at that moment, as another process would find it.
struct Guard {
    peer: MemoryStore,
    found: Rc<Cell<Option<State>>>,
    /// Function that the drop calls.
    then: Option<Box<dyn FnOnce()>>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.found.set(state_of(&self.peer));
        if let Some(then) = self.then.take() {
            then();
        }
    }
}

/// State of the key `k`, read without waiting.
fn state_of(store: &MemoryStore) -> Option<State> {
    let found: Option<Inspection> = store.inspect(&World::key("k")).now_or_never().expect("no wait").expect("answers");
    found.map(|found| found.record.state)
}

/// Store, its clock, and the state of the key that the drop of a [`Guard`] found.
struct Scene {
    clock: ManualClock,
    memory: MemoryStore,
    found: Rc<Cell<Option<State>>>,
}

impl Scene {
    fn new() -> Self {
        let clock = ManualClock::new();
        let memory = MemoryStore::options().clock(clock.clone()).build();
        Self { clock, memory, found: Rc::default() }
    }

    fn guard(&self) -> Guard {
        Guard { peer: self.memory.peer(), found: Rc::clone(&self.found), then: None }
    }

    fn operation(&self, policy: Policy) -> Operation {
        Operation::new(&self.memory, Ok(World::key("k")), policy)
    }

    /// Asserts that the attempt held the key when the value was dropped, and that the record's state is `left` now.
    fn assert_held_then(&self, way: &str, left: &State) {
        let found = self.found.take();
        assert!(
            matches!(found, Some(State::Pending { .. })),
            "{way}: when the value was dropped, the record was {found:?}"
        );
        assert_eq!(state_of(&self.memory).as_ref(), Some(left), "{way}");
    }
}

const POLICIES: [(Policy, State); 2] =
    [(POLICY, State::Released), (POLICY.on_crash(OnCrash::Fail), State::Interrupted)];

/// Body that has a value and never returns.
async fn hangs(_value: Guard) -> Result<u32, Error> {
    std::future::pending().await
}

#[tokio::test]
async fn a_body_that_returns_drops_its_values_before_the_end_is_written() {
    for result in [Ok(1), Err(Failure::Declined(1))] {
        let scene = Scene::new();
        let guard = scene.guard();
        let left = if result.is_ok() { "Completed" } else { "Released" };
        let body = async move {
            let _guard = guard;
            result
        };
        let _ = scene.operation(POLICY).run(body).await;
        assert!(matches!(scene.found.take(), Some(State::Pending { .. })));
        assert!(format!("{:?}", state_of(&scene.memory)).starts_with(&format!("Some({left}")));
    }
}

#[tokio::test]
async fn a_dropped_call_drops_the_values_of_its_body_before_it_frees_the_key() {
    for (policy, left) in POLICIES {
        let scene = Scene::new();
        let body = hangs(scene.guard());
        let mut call = Box::pin(scene.operation(policy).run(body));
        assert!(poll_once(call.as_mut()).await.is_pending());
        drop(call);
        scene.assert_held_then("dropped", &left);
    }
}

#[tokio::test]
async fn a_panic_drops_the_values_of_its_body_before_it_frees_the_key() {
    for (policy, left) in POLICIES {
        // The body panics at its first poll or at its second, or a value panics when the call is dropped.
        for polls in [0, 1, 2] {
            let scene = Scene::new();
            let mut guard = scene.guard();
            if polls == 2 {
                guard.then = Some(Box::new(|| std::panic::resume_unwind(Box::new("a value panics"))));
            }
            let body = async move {
                let _guard = guard;
                yields(polls).await;
                std::panic::resume_unwind(Box::new("a body panics"))
            };
            let mut call = Box::pin(scene.operation(policy).run::<u32, Error, _>(body));
            for _ in 0..polls {
                assert!(poll_once(call.as_mut()).await.is_pending());
            }
            if polls < 2 {
                assert!(AssertUnwindSafe(call.as_mut()).catch_unwind().await.is_err());
            }
            assert_eq!(catch_unwind(AssertUnwindSafe(|| drop(call))).is_err(), polls == 2);
            scene.assert_held_then("panicked", &left);
        }
    }
}

#[tokio::test]
async fn a_time_out_drops_the_values_of_its_body_before_it_frees_the_key() {
    for (policy, left) in POLICIES {
        let scene = Scene::new();
        let body = hangs(scene.guard());
        let call = scene.operation(policy.timeout(LEASE * 2)).run(body);
        assert!(matches!(driving(&scene.clock, call).await, Err(Error::TimedOut { .. })));
        scene.assert_held_then("timed out", &left);
    }
}

#[tokio::test]
async fn the_values_of_a_body_without_a_lease_are_dropped_before_its_caller_goes_on() {
    let scene = Scene::new();
    let (guard, dropped) = (scene.guard(), Notify::new());
    let body = async {
        let _guard = guard;
        dropped.notified().await;
        Ok::<u32, Error>(1)
    };
    let mut call = Box::pin(scene.operation(POLICY.mode(Mode::Shadow)).run(body));
    assert!(poll_once(call.as_mut()).await.is_pending());
    drop(call);
    scene.assert_held_then("in shadow mode", &State::Released);
}

/// The lease is renewed while values are dropped, even after the body's `timeout`.
#[test]
fn a_lease_is_kept_while_values_are_dropped() {
    for timed_out in [false, true] {
        let clock = ManualClock::new();
        let memory = MemoryStore::options().clock(OddClock::new(clock.clone()).tasks_on_their_own_thread()).build();
        let store = FaultyStore::new(&memory);
        let (policy, peer) = (POLICY.timeout(LEASE * 6), memory.peer());
        let found = Rc::new(Cell::new(None));
        // The drop of this value takes five leases. At its end, another attempt still finds the key held.
        let guard = Guard {
            peer: memory.peer(),
            found: Rc::clone(&found),
            then: Some(Box::new({
                let (store, clock) = (store.clone(), clock.clone());
                move || {
                    let before = store.count(StoreCall::Renew);
                    // Fifteen beats, in five leases, renew the lease while the drop blocks its thread.
                    for beats in 1..=15 {
                        super::keeping::block_until("the sleep", || clock.next_wake().is_some());
                        clock.advance(LEASE / 3);
                        super::keeping::block_until("a beat", || store.count(StoreCall::Renew) >= before + beats);
                    }
                    let other = Operation::new(&peer, Ok(World::key("k")), POLICY);
                    let other = other.run(async { Ok::<_, Error>(2) }).now_or_never().expect("memory answers at once");
                    assert!(matches!(other, Err(Error::InProgress { .. })), "taken over: {other:?}");
                }
            })),
        };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let body = async move {
            let _guard = guard;
            std::future::pending::<Result<u32, Error>>().await
        };
        let mut call = Box::pin(Operation::new(&store, Ok(World::key("k")), policy).run(body));
        assert!(runtime.block_on(poll_once(call.as_mut())).is_pending());
        // The clock advances until just before the `timeout`, or beyond it.
        for beats in 1..=if timed_out { 17 } else { 16 } {
            super::keeping::block_until("the sleep", || clock.next_wake().is_some());
            clock.advance(LEASE / 3);
            super::keeping::block_until("a beat", || store.count(StoreCall::Renew) >= beats);
        }
        if timed_out {
            clock.advance(LEASE / 3);
            assert!(matches!(runtime.block_on(call), Err(Error::TimedOut { .. })));
        } else {
            drop(call);
        }
        // The drop of the value has ended and has found the key held. The key is free now.
        runtime.block_on(store.context().flush());
        assert!(matches!(found.take(), Some(State::Pending { .. })));
        assert_eq!(state_of(&memory), Some(State::Released));
    }
}
