//! Many messages at once.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use idem_runtime::{Disposition, InProgress, Mode, Refusal, observe, observe_all};

use super::super::*;

#[tokio::test]
async fn items_of_one_key_run_once_and_the_others_replay() {
    for limit in [1, 2, 3, 16] {
        let world = World::new();
        let calls = [("a", "k"), ("b", "k"), ("c", "other"), ("d", "k")];
        let calls = calls.map(|(id, key)| (id, observe(world.lasting(key, POLICY, Duration::from_secs(5)))));
        let batch = world.drive(observe_all(calls).limit(limit)).await;
        assert_eq!(world.runs(), 2, "limit {limit}");
        let ids: Vec<_> = batch.items().iter().map(|item| item.id).collect();
        assert_eq!(ids, ["a", "b", "c", "d"], "in their order");
        let replayed: Vec<_> = batch.items().iter().map(|item| item.outcome.replayed()).collect();
        assert_eq!(replayed, [false, true, false, true], "limit {limit}");
        assert_eq!(batch.acknowledged().count(), 4);
        assert!(batch.item_failures().batch_item_failures.is_empty());
        assert_eq!(serde_json::to_string(&batch.item_failures()).unwrap(), r#"{"batchItemFailures":[]}"#);
    }
}

#[tokio::test]
async fn what_fails_in_a_batch_is_listed_and_nothing_else() {
    let world = World::new();
    // Another process is at work on one of them.
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
async fn a_batch_runs_no_more_than_its_limit_and_starts_nothing_early() {
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
    assert_eq!((made.get(), running.get()), (7, 7), "the iterator is asked only for what may start");
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
async fn when_the_first_of_a_key_fails_the_next_one_runs() {
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
async fn items_whose_calls_cross_do_not_wait_for_each_other_for_ever() {
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

    // Both at once, and one item that gives up in the middle of its call.
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
async fn a_batch_without_protection_runs_every_item() {
    let world = World::new();
    let off = POLICY.mode(Mode::Off);
    let calls = [1, 2].map(|id| (id, observe(world.lasting("k", off, Duration::from_secs(1)))));
    let batch = world.drive(observe_all(calls)).await;
    assert_eq!((batch.acknowledged().count(), world.runs(), world.now()), (2, 2, Duration::from_secs(1)));
}

#[tokio::test]
async fn each_item_keeps_what_its_delivery_was_told() {
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
    assert_eq!(beats, ["a", "a", "b", "b"], "the one that waits for its turn is extended as well");
}
