//! Batches: many messages that one call of `observe_all` handles.

use std::cell::Cell;
use std::sync::Mutex;

use idem_runtime::brokers::{Batch, KafkaRecord};
use idem_runtime::record::State;
use idem_runtime::{Disposition, InProgress, Mode, Refusal, StoreExt as _, observe, observe_all};

use super::super::*;

#[tokio::test]
async fn the_first_item_of_a_key_runs_and_later_items_of_the_key_replay() {
    for limit in [1, 2, 3, 16] {
        let world = World::new();
        let calls = [("a", "k"), ("b", "k"), ("c", "other"), ("d", "k")];
        let calls = calls.map(|(id, key)| (id, observe(world.lasting(key, POLICY, Duration::from_secs(5)))));
        let batch = world.drive(observe_all(calls).limit(limit)).await;
        assert_eq!(world.runs(), 2, "limit {limit}");
        let ids: Vec<_> = batch.items().iter().map(|item| item.id).collect();
        assert_eq!(ids, ["a", "b", "c", "d"], "the results are in the order of the items");
        let replayed: Vec<_> = batch.items().iter().map(|item| item.outcome.replayed()).collect();
        assert_eq!(replayed, [false, true, false, true], "limit {limit}");
        assert_eq!(batch.acknowledged().count(), 4);
        assert!(batch.item_failures().batch_item_failures.is_empty());
        assert_eq!(serde_json::to_string(&batch.item_failures()).unwrap(), r#"{"batchItemFailures":[]}"#);
    }
}

#[tokio::test]
async fn only_failed_items_of_a_batch_are_listed() {
    let world = World::new();
    // Another process runs the operation `busy`.
    let mut elsewhere = pin!(world.lasting("busy", POLICY, LEASE));
    assert!(poll_once(elsewhere.as_mut()).await.is_pending());
    let failing = async |id: u32| -> Result<u32, Error> {
        match id {
            1 => panic!("on purpose"),
            2 => world.lasting("busy", POLICY, Duration::ZERO).await,
            3 => world.lasting("", POLICY, Duration::ZERO).await,
            4 => world.operation("4", POLICY).run(async { Err(Error::NoAttempt) }).await,
            _ => world.lasting(&id.to_string(), POLICY, Duration::from_secs(1)).await,
        }
    };
    let batch = world.drive(observe_all((0..6).map(|id| (id, observe(failing(id)))))).await;
    let dispositions: Vec<_> = batch.items().iter().map(idem_runtime::brokers::BatchItem::disposition).collect();
    assert!(matches!(dispositions[1], Disposition::Retry { .. }));
    assert_eq!(batch.items()[2].outcome.refusal(), Some(Refusal::InProgress));
    assert_eq!(
        (dispositions[0], dispositions[3], dispositions[5]),
        (Disposition::Ack, Disposition::DeadLetter, Disposition::Ack)
    );
    assert!(matches!(batch.items()[1].result, Err(Error::Panicked { .. })));
    assert_eq!(batch.acknowledged().copied().collect::<Vec<_>>(), [0, 5]);
    let failures = serde_json::to_value(batch.item_failures()).unwrap();
    let expected = serde_json::json!({ "batchItemFailures": [
        { "itemIdentifier": "1" }, { "itemIdentifier": "2" }, { "itemIdentifier": "3" }, { "itemIdentifier": "4" },
    ] });
    assert_eq!(failures, expected);
    assert_eq!(batch.into_items().len(), 6);
}

#[tokio::test]
async fn a_batch_starts_no_more_items_than_its_limit() {
    let world = World::new();
    let (running, most, made) = (Cell::new(0_usize), Cell::new(0_usize), Cell::new(0_usize));
    let body = async |id: u64| -> Result<u32, Error> {
        running.set(running.get() + 1);
        most.set(most.get().max(running.get()));
        let result = world.lasting(&id.to_string(), POLICY, Duration::from_secs(1 + id % 3)).await;
        running.set(running.get() - 1);
        result
    };
    let calls = (0..100).map(|id| {
        made.set(made.get() + 1);
        assert!(made.get() <= running.get() + 100);
        (id, observe(body(id)))
    });
    let mut batch = Box::pin(observe_all(calls).limit(7));
    assert!(poll_once(batch.as_mut()).await.is_pending());
    assert_eq!((made.get(), running.get()), (7, 7), "the iterator is asked only for items that may start");
    let batch = world.drive(batch).await;
    assert_eq!((batch.items().len(), world.runs(), most.get(), running.get()), (100, 100, 7, 0));
    assert_eq!(
        observe_all(std::iter::empty::<(u8, idem_runtime::future::Observe<std::future::Ready<Result<u8, Error>>>)>())
            .await
            .items()
            .len(),
        0
    );
}

#[tokio::test]
async fn after_a_failed_item_the_next_item_of_its_key_runs() {
    let world = World::new();
    let tries = Arc::new(Mutex::new(0));
    let call = |id: u8| {
        let tries = Arc::clone(&tries);
        let body = async move {
            let number = {
                let mut tries = tries.lock().unwrap();
                *tries += 1;
                *tries
            };
            if number == 1 { Err(Error::NoAttempt) } else { Ok(number) }
        };
        (id, observe(world.operation("k", POLICY).run(body)))
    };
    let batch = world.drive(observe_all([call(1), call(2), call(3)])).await;
    assert_eq!(*tries.lock().unwrap(), 2);
    assert_eq!(batch.acknowledged().copied().collect::<Vec<_>>(), [2, 3]);
    assert!(batch.items()[2].outcome.replayed());
}

#[tokio::test]
async fn items_that_use_two_keys_in_opposite_order_all_end() {
    let world = World::new();
    let crossing = async |keys: [&'static str; 2]| -> Result<u32, Error> {
        for key in keys {
            world.lasting(key, POLICY, Duration::from_secs(1)).await?;
        }
        Ok(0)
    };
    let calls = [(1, observe(crossing(["a", "b"]))), (2, observe(crossing(["b", "a"])))];
    let batch = world.drive(observe_all(calls)).await;
    assert_eq!((batch.acknowledged().count(), world.runs()), (2, 2));

    // One item makes two calls concurrently, and another item drops a call that is under way.
    let both = async |first: &'static str, second: &'static str| -> Result<u32, Error> {
        let (first, second) = (world.lasting(first, POLICY, LEASE), world.lasting(second, POLICY, LEASE));
        let (first, second) = tokio::join!(first, second);
        Ok(first? + second?)
    };
    let gives_up = async || -> Result<u32, Error> {
        let mut call = Box::pin(world.lasting("c", POLICY, LEASE));
        assert!(poll_once(call.as_mut()).await.is_pending());
        drop(call);
        Err(Error::NoAttempt)
    };
    let futures: Vec<futures::future::LocalBoxFuture<'_, Result<u32, Error>>> =
        vec![Box::pin(gives_up()), Box::pin(both("c", "d")), Box::pin(both("d", "c"))];
    let batch = world.drive(observe_all(futures.into_iter().enumerate().map(|(id, call)| (id, observe(call))))).await;
    assert_eq!(batch.acknowledged().copied().collect::<Vec<_>>(), [1, 2]);
}

#[tokio::test]
async fn in_mode_off_a_batch_runs_every_item() {
    let world = World::new();
    let off = POLICY.mode(Mode::Off);
    let calls = [1, 2].map(|id| (id, observe(world.lasting("k", off, Duration::from_secs(1)))));
    let batch = world.drive(observe_all(calls)).await;
    assert_eq!((batch.acknowledged().count(), world.runs(), world.now()), (2, 2, Duration::from_secs(1)));
}

#[tokio::test]
async fn each_item_keeps_the_attributes_of_its_delivery() {
    let world = World::new();
    let beats = Arc::new(Mutex::new(Vec::new()));
    let calls = ["a", "b"].map(|id| {
        let told = Arc::clone(&beats);
        let policy = POLICY.in_progress(InProgress::Wait(LEASE));
        let call = observe(world.lasting("k", policy, Duration::from_secs(25)));
        let call = call.delivery(1).on_beat(Duration::from_secs(10), move |_| {
            told.lock().unwrap().push(id);
            async { Ok::<_, Error>(()) }
        });
        (id, call)
    });
    let batch = world.drive(observe_all(calls)).await;
    assert_eq!(batch.acknowledged().count(), 2);
    let mut beats = beats.lock().unwrap().clone();
    beats.sort_unstable();
    assert_eq!(beats, ["a", "a", "b", "b"], "the item that waits for its turn is extended as well");
}

/// Batches of ten thousand items, with one key for all items or a key for each item: the number of polls of an item
/// does not grow with the batch.
#[tokio::test]
async fn the_number_of_polls_of_an_item_does_not_grow_with_its_batch() {
    const ITEMS: usize = 10_000;
    for keys in [1, ITEMS] {
        let store = MemoryStore::new();
        let polls = Cell::new(0_usize);
        let calls = (0..ITEMS).map(|id| {
            let body = async {
                tokio::task::yield_now().await;
                Ok(1_u8)
            };
            let call = Operation::new(&store, Key::new("brokers", id % keys), POLICY).run::<_, Error, _>(body);
            let polls = &polls;
            let counted = async move {
                let mut call = pin!(call);
                poll_fn(|cx| {
                    polls.set(polls.get() + 1);
                    call.as_mut().poll(cx)
                })
                .await
            };
            (id, observe(counted))
        });
        let batch = observe_all(calls).limit(ITEMS).await;
        assert_eq!(batch.acknowledged().count(), ITEMS);
        assert!(polls.get() <= 6 * ITEMS, "{} polls", polls.get());
    }
}

#[tokio::test]
async fn a_call_that_no_task_polls_delays_another_item_until_its_time_limit() {
    const LIMIT: Duration = Duration::from_secs(60);
    let world = World::new();
    let policy = POLICY.timeout(LIMIT);
    let keeping = async |first: &'static str, second: &'static str| -> Result<u32, Error> {
        let mut kept = Box::pin(world.lasting(first, policy, Duration::from_secs(1)));
        assert!(poll_once(kept.as_mut()).await.is_pending());
        world.lasting(second, policy, Duration::from_secs(1)).await
    };
    let calls = [(1, observe(keeping("a", "b"))), (2, observe(keeping("b", "a")))];
    let batch = world.drive(observe_all(calls)).await;
    assert_eq!(batch.items().len(), 2);
    assert!(world.now() <= LIMIT + LEASE + Duration::from_secs(2), "{:?}", world.now());
}

/// Returns how many items of `batch` succeeded, how many were cut off while running, and how many did not begin.
fn counted<I, T>(batch: &Batch<I, T, Error>) -> (usize, usize, usize) {
    let count = |is: &dyn Fn(&Result<T, Error>) -> bool| batch.items().iter().filter(|item| is(&item.result)).count();
    (
        count(&|result| result.is_ok()),
        count(&|result| matches!(result, Err(Error::DeadlinePassed { attempt: Some(_), .. }))),
        count(&|result| matches!(result, Err(Error::DeadlinePassed { attempt: None, .. }))),
    )
}

#[tokio::test(start_paused = true)]
async fn after_its_deadline_a_batch_returns_the_finished_items() {
    let store = MemoryStore::new();
    let runs = Cell::new(0);
    let call = |id: u64| {
        let runs = &runs;
        let body = async move {
            runs.set(runs.get() + 1);
            tokio::time::sleep(Duration::from_secs(id)).await;
            Ok::<_, Error>(id)
        };
        (id, observe(Operation::new(&store, Key::new("deadline", id), POLICY).run(body)))
    };
    // At most two items run at a time: items 1 and 3 end, items 5 and 7 are cut off, and items 9 and 11 do not begin.
    let batch = observe_all([1, 3, 5, 7, 9, 11].map(call)).limit(2).deadline(Duration::from_millis(5_500)).await;
    assert_eq!(counted(&batch), (2, 2, 2));
    assert_eq!(runs.get(), 4);
    let ids: Vec<_> = batch.items().iter().map(|item| item.id).collect();
    assert_eq!(ids, [1, 3, 5, 7, 9, 11], "the results are in the order of the items");
    let failed: Vec<_> = batch.item_failures().batch_item_failures.into_iter().map(|it| it.item_identifier).collect();
    assert_eq!(failed, ["5", "7", "9", "11"]);
    for item in &batch.items()[2..] {
        assert!(matches!(item.disposition(), Disposition::Retry { after } if !after.is_zero()), "{item:?}");
        assert_eq!(item.outcome.cancelled(), item.id < 9);
        assert_eq!(item.outcome.uncertain(), item.id < 9);
    }
    store.flush().await;
    let record = store.inspect(&Key::new("deadline", 5).unwrap()).await.unwrap().unwrap().record;
    assert_eq!(record.state, State::Released, "the next delivery runs at once");
    // A batch whose items end early does not wait for its deadline.
    let batch = observe_all([1, 3].map(call)).deadline(LEASE).await;
    assert_eq!(counted(&batch), (2, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_items_that_have_made_no_call_and_groups_that_wait() {
    let calls = [("a", "g"), ("b", "g"), ("c", "h")].map(|(id, group)| {
        let never: Pin<Box<dyn Future<Output = Result<u8, Error>>>> = Box::pin(std::future::pending());
        (id, observe(never).group(group))
    });
    let batch = observe_all(calls).deadline(Duration::from_secs(1)).await;
    assert_eq!(counted(&batch), (0, 0, 3));
    assert_eq!(batch.item_failures().batch_item_failures.len(), 3);
    assert_eq!(batch.items().iter().map(|item| item.id).collect::<String>(), "abc");
}

/// Message of a batch: its group, the way in which its handler ends, and the duration of the handler in seconds.
type Message = (Option<u8>, End, u64);

#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Done,
    Failed,
    Poison,
}

mod groups {
    use proptest::prelude::*;

    use super::*;

    fn message() -> impl Strategy<Value = Message> {
        let end = prop_oneof![5 => Just(End::Done), 1 => Just(End::Failed), 1 => Just(End::Poison)];
        (prop::option::weighted(0.8, 0..3_u8), end, 0..5_u64)
    }

    async fn handled(messages: &[Message], limit: usize) -> (Vec<(usize, bool)>, usize, Vec<String>, Vec<bool>) {
        let world = World::new();
        let (events, running, most) = (Mutex::new(Vec::new()), Cell::new(0_usize), Cell::new(0_usize));
        let calls = messages.iter().enumerate().map(|(id, &(group, end, seconds))| {
            let (world, events, running, most) = (&world, &events, &running, &most);
            let body = async move {
                running.set(running.get() + 1);
                most.set(most.get().max(running.get()));
                events.lock().unwrap().push((id, true));
                world.sleep(Duration::from_secs(seconds)).await;
                events.lock().unwrap().push((id, false));
                running.set(running.get() - 1);
                if end == End::Failed { Err(Error::NoAttempt) } else { Ok(id) }
            };
            let key = if end == End::Poison { String::new() } else { id.to_string() };
            let call = async move {
                if end == End::Poison {
                    // The handler works before its call. The call is refused, because its key is empty.
                    events.lock().unwrap().push((id, true));
                    world.sleep(Duration::from_secs(seconds)).await;
                    events.lock().unwrap().push((id, false));
                }
                world.operation(&key, POLICY).run(body).await
            };
            let observed = observe(call);
            let observed = match group {
                Some(group) => observed.group(group.to_string()),
                None => observed,
            };
            (id, observed)
        });
        let batch = world.drive(observe_all(calls).limit(limit)).await;
        let failures = batch.item_failures().batch_item_failures.into_iter().map(|it| it.item_identifier).collect();
        let held_back = batch.items().iter().map(|item| matches!(item.result, Err(Error::HeldBack { .. }))).collect();
        (events.into_inner().unwrap(), most.get(), failures, held_back)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 200, ..ProptestConfig::default() })]

        #[test]
        fn messages_of_a_group_run_in_order_up_to_the_first_failure(
            messages in prop::collection::vec(message(), 1..14),
            limit in 1..6_usize,
        ) {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let (events, most, failures, held_back) = runtime.block_on(handled(&messages, limit));
            prop_assert!(most <= limit);
            let mut expected = Vec::new();
            for (id, &(group, end, _)) in messages.iter().enumerate() {
                let before = messages[..id].iter().filter(|message| group.is_some() && message.0 == group);
                let follows_a_failure = before.clone().any(|(_, end, _)| *end != End::Done);
                prop_assert_eq!(held_back[id], follows_a_failure);
                prop_assert_eq!(events.contains(&(id, true)), !follows_a_failure, "items after a failure do not begin");
                if follows_a_failure || end != End::Done {
                    expected.push(id.to_string());
                }
            }
            prop_assert_eq!(failures, expected);
            for group in 0..3 {
                let of_group: Vec<_> = events.iter().filter(|(id, _)| messages[*id].0 == Some(group)).collect();
                for pair in of_group.chunks(2) {
                    prop_assert_eq!((pair[0].0, pair[0].1, pair[1].1), (pair[1].0, true, false), "a group runs one item at a time");
                }
                prop_assert!(of_group.is_sorted_by_key(|(id, _)| *id), "a group's items run in order");
            }
        }
    }
}

#[tokio::test]
async fn a_dead_lettered_message_does_not_stop_its_group() {
    let world = World::new();
    let call = |offset: i64, key: &'static str| {
        (KafkaRecord::new("orders-0", offset), observe(world.lasting(key, POLICY, Duration::ZERO)).group("orders-0"))
    };
    let failures = |batch: &Batch<KafkaRecord, u32, Error>| serde_json::to_value(batch.kafka_failures()).unwrap();
    let record = |offset: i64| serde_json::json!({ "itemIdentifier": { "partition": "orders-0", "offset": offset } });
    let mut batch = world.drive(observe_all([call(7, "a"), call(8, ""), call(9, "b")])).await;
    assert_eq!(failures(&batch), serde_json::json!({ "batchItemFailures": [record(8), record(9)] }));
    for item in batch.dead_letters() {
        assert_eq!(item.id.offset, 8);
        item.set_aside();
    }
    assert_eq!(failures(&batch), serde_json::json!({ "batchItemFailures": [record(9)] }), "9 has not begun");
    assert_eq!(batch.dead_letters().count(), 0);
    assert_eq!(batch.acknowledged().map(|record| record.offset).collect::<Vec<_>>(), [7, 8]);
}
