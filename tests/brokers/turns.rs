//! Batches of random items that share keys: each batch ends, and no item waits for work on keys that it does not use.

use std::cell::RefCell;
use std::panic::AssertUnwindSafe;

use futures::FutureExt as _;
use futures::future::LocalBoxFuture;
use idem_runtime::{Mode, observe, observe_all};
use proptest::prelude::*;

use super::super::*;

/// Result of a call's body.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Ok,
    Err,
    Panic,
}

/// Call whose body takes `seconds`. The handler drops the call after `timeout`, if one is set.
#[derive(Clone, Debug)]
struct Call {
    key: usize,
    seconds: u64,
    end: End,
    timeout: Option<u64>,
}

#[derive(Clone, Debug)]
enum Step {
    /// The item makes these calls concurrently.
    Calls(Vec<Call>),
    /// The item works for this many seconds without a call.
    Work(u64),
}

fn call() -> impl Strategy<Value = Call> {
    let end = prop_oneof![6 => Just(End::Ok), 2 => Just(End::Err), 1 => Just(End::Panic)];
    let timeout = prop_oneof![2 => Just(None), 1 => (1..6_u64).prop_map(Some)];
    (0..3_usize, 0..9_u64, end, timeout).prop_map(|(key, seconds, end, timeout)| Call { key, seconds, end, timeout })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => call().prop_map(|call| Step::Calls(vec![call])),
        2 => (call(), call()).prop_map(|(one, other)| Step::Calls(vec![one, other])),
        1 => (1..200_u64).prop_map(Step::Work),
    ]
}

impl Call {
    /// Longest time for which the body can run, in seconds.
    fn longest(&self) -> u64 {
        self.timeout.map_or(self.seconds, |timeout| timeout.min(self.seconds))
    }
}

/// Longest duration of `item` when it runs alone: in total, and for each key that it uses.
fn longest(item: &[Step]) -> (u64, [Option<u64>; 3]) {
    let (mut all, mut on) = (0, [None; 3]);
    for step in item {
        match step {
            Step::Work(seconds) => all += seconds,
            Step::Calls(calls) => {
                let mut now = [0; 3];
                for call in calls {
                    now[call.key] += call.longest();
                    *on[call.key].get_or_insert(0) += call.longest();
                }
                // Two calls for one key may run one after the other.
                all += now.into_iter().max().unwrap_or_default();
            }
        }
    }
    (all, on)
}

/// Number of bodies that run now for each key, the largest such number so far, and the items' durations.
#[derive(Default)]
struct BatchEvents {
    running: [usize; 3],
    most: usize,
    /// Duration of each item.
    took: Vec<Option<Duration>>,
}

/// Guard of a running body. `running` counts a body until its guard is dropped.
struct Runs<'a>(&'a RefCell<BatchEvents>, usize);

impl<'a> Runs<'a> {
    fn new(seen: &'a RefCell<BatchEvents>, key: usize) -> Self {
        let mut now = seen.borrow_mut();
        now.running[key] += 1;
        now.most = now.most.max(now.running[key]);
        drop(now);
        Self(seen, key)
    }
}

impl Drop for Runs<'_> {
    fn drop(&mut self) {
        self.0.borrow_mut().running[self.1] -= 1;
    }
}

async fn make(world: &World, seen: &RefCell<BatchEvents>, policy: Policy, call: &Call) {
    let body = async {
        let _runs = Runs::new(seen, call.key);
        world.sleep(Duration::from_secs(call.seconds)).await;
        match call.end {
            End::Ok => Ok(0_u32),
            End::Err => Err(Error::NoAttempt),
            End::Panic => std::panic::resume_unwind(Box::new("on purpose")),
        }
    };
    let run = AssertUnwindSafe(world.operation(["a", "b", "c"][call.key], policy).run(body)).catch_unwind();
    match call.timeout {
        None => drop(run.await),
        // The time-out drops the call and its body.
        Some(timeout) => tokio::select! {
            biased;
            () = world.sleep(Duration::from_secs(timeout)) => {}
            ended = run => drop(ended),
        },
    }
}

async fn handle(world: &World, seen: &RefCell<BatchEvents>, policy: Policy, item: &[Step]) {
    for step in item {
        match step {
            Step::Work(seconds) => world.sleep(Duration::from_secs(*seconds)).await,
            Step::Calls(calls) => {
                futures::future::join_all(calls.iter().map(|call| make(world, seen, policy, call))).await;
            }
        }
    }
}

async fn run(items: &[Vec<Step>], limit: usize, mode: Mode) -> BatchEvents {
    let world = World::new();
    let seen = RefCell::new(BatchEvents { took: vec![None; items.len()], ..BatchEvents::default() });
    let policy = POLICY.mode(mode);
    let calls = items.iter().enumerate().map(|(id, item)| {
        let (world, seen) = (&world, &seen);
        let call: LocalBoxFuture<'_, Result<(), Error>> = Box::pin(async move {
            let began = world.now();
            handle(world, seen, policy, item).await;
            seen.borrow_mut().took[id] = Some(world.now() - began);
            Ok(())
        });
        (id, observe(call))
    });
    let batch = world.drive(observe_all(calls).limit(limit)).await;
    assert_eq!(batch.items().len(), items.len());
    seen.into_inner()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, max_shrink_iters: 300, ..ProptestConfig::default() })]

    #[test]
    fn an_item_waits_for_work_on_its_own_keys_only(
        items in prop::collection::vec(prop::collection::vec(step(), 1..5), 1..6),
        limit in 1..6_usize,
    ) {
        let seen = runtime().block_on(run(&items, limit, Mode::Enforce));
        prop_assert!(seen.most <= 1, "two bodies of one key at a time");
        for (id, item) in items.iter().enumerate() {
            let (own, keys) = longest(item);
            let others = items.iter().enumerate().filter(|(other, _)| *other != id);
            let others: u64 = others
                .flat_map(|(_, other)| longest(other).1.into_iter().zip(keys))
                .filter_map(|(on, uses)| uses.and(on))
                .sum();
            let took = seen.took[id].expect("the item has ended");
            prop_assert!(took <= Duration::from_secs(own + others), "item {} took {:?}, of {} + {}", id, took, own, others);
        }
    }

    #[test]
    fn shadow_mode_delays_no_item(
        items in prop::collection::vec(prop::collection::vec(step(), 1..5), 1..6),
        limit in 1..6_usize,
    ) {
        let seen = runtime().block_on(run(&items, limit, Mode::Shadow));
        for (id, item) in items.iter().enumerate() {
            let took = seen.took[id].expect("the item has ended");
            prop_assert!(took <= Duration::from_secs(longest(item).0), "item {} took {:?}", id, took);
        }
    }
}

#[test]
fn items_that_drop_a_call_and_then_use_each_others_key_all_end() {
    let call = |key, timeout| Step::Calls(vec![Call { key, seconds: 9, end: End::Ok, timeout }]);
    let items = [vec![call(0, Some(1)), call(1, None)], vec![call(1, Some(1)), call(0, None)]];
    let seen = runtime().block_on(run(&items, 2, Mode::Enforce));
    assert_eq!((seen.most, seen.took), (1, vec![Some(Duration::from_secs(10)); 2]));
}
