//! Intake of a consumer: slots of handlers, outages of store and broker, shutdown, messages that are set aside.

use std::collections::BTreeMap;

use idem_runtime::brokers::{DeadLetter, Intake};
use idem_runtime::{Disposition, KeyDisplay, Outcome, StoreErrorKind, observe};
use idem_tests::{Fault, StoreCall};

use super::super::*;

const AWAY: Fault = Fault::Before(StoreErrorKind::Unavailable);
const SECOND: Duration = Duration::from_secs(1);

impl World {
    fn set(&self, calls: &[StoreCall], fault: Fault) {
        for call in calls {
            self.store.always(*call, fault);
        }
    }

    /// Makes one call, whose body is ready immediately.
    async fn call(&self, key: &str) -> (Result<u32, Error>, Outcome) {
        self.drive(observe(self.lasting(key, POLICY, Duration::ZERO))).await
    }

    /// Polls `future` while the clock moves by `duration`. Returns the output of `future` if it is ready by then.
    async fn within<F: Future + Unpin>(&self, duration: Duration, mut future: F) -> Option<F::Output> {
        let end = self.now() + duration;
        loop {
            settle().await;
            if let Poll::Ready(output) = poll_once(Pin::new(&mut future)).await {
                return Some(output);
            }
            settle().await;
            let left = end - self.now();
            if left.is_zero() {
                // Tasks that the first poll has started may have ended.
                return match poll_once(Pin::new(&mut future)).await {
                    Poll::Ready(output) => Some(output),
                    Poll::Pending => None,
                };
            }
            self.clock.advance(self.clock.next_wake().unwrap_or(left).clamp(Duration::from_nanos(1), left));
        }
    }
}

#[tokio::test]
async fn no_more_slots_are_given_than_there_are_handlers() {
    let world = World::new();
    let intake = Intake::new(&world.store, 2);
    let (first, _second) = (intake.slot().await.unwrap(), intake.slot().await.unwrap());
    assert!(intake.try_slot().is_none());
    let mut third = Box::pin(intake.slot());
    assert!(poll_once(third.as_mut()).await.is_pending());
    drop(first);
    let third = third.await;
    assert!(third.is_some() && intake.try_slot().is_none());
}

#[tokio::test]
async fn an_outage_of_the_store_pauses_the_intake_until_a_ping_succeeds() {
    let world = World::new();
    let intake = Intake::new(&world.store, 8);
    let all = [StoreCall::Reserve, StoreCall::Ping];
    world.set(&all, AWAY);
    assert!(intake.try_slot().is_some(), "no operation has failed yet");
    let (_, outcome) = world.call("a").await;
    assert!(outcome.store_failed() && !outcome.executed());
    let mut slot = Box::pin(intake.slot());
    assert!(world.within(SECOND * 600, &mut slot).await.is_none(), "a message was fetched in the outage");
    let pings = world.store.count(StoreCall::Ping);
    assert!((120..300).contains(&pings), "{pings} pings in ten minutes");
    world.set(&all, Fault::None);
    let slot = world.within(SECOND * 5, slot).await;
    assert!(slot.flatten().is_some(), "the store answers again");
    // The first reservation shows that the store accepts messages.
    let (_, outcome) = world.call("a").await;
    assert_eq!(outcome.disposition(), Disposition::Ack);
    let slots: Vec<_> = std::iter::from_fn(|| intake.try_slot()).collect();
    assert_eq!(slots.len(), 8);
}

#[tokio::test]
async fn a_single_failure_of_the_store_delays_no_message() {
    let world = World::new();
    let intake = Intake::new(&world.store, 8);
    world.set(&[StoreCall::Reserve], AWAY);
    world.call("a").await.0.unwrap_err();
    world.set(&[StoreCall::Reserve], Fault::None);
    let before = world.now();
    let slot = world.within(Duration::ZERO, Box::pin(intake.slot())).await;
    assert!(slot.flatten().is_some());
    assert_eq!(world.now(), before);
}

#[tokio::test]
async fn a_failed_renewal_pauses_the_intake_before_a_message_fails() {
    let world = World::new();
    let intake = Intake::new(&world.store, 8);
    world.set(&[StoreCall::Renew, StoreCall::Ping], AWAY);
    let mut long = Box::pin(observe(world.lasting("a", POLICY, LEASE / 2)));
    assert!(world.within(LEASE * 2 / 5, &mut long).await.is_none(), "the body runs");
    assert!(world.within(SECOND, Box::pin(intake.slot())).await.is_none());
    assert_eq!(world.store.count(StoreCall::Reserve), 1, "no reservation has failed");
    world.set(&[StoreCall::Renew, StoreCall::Ping], Fault::None);
    assert!(world.within(SECOND * 5, Box::pin(intake.slot())).await.flatten().is_some());
}

/// A full store answers pings, and refuses each reservation.
#[tokio::test]
async fn a_store_that_answers_pings_and_no_reservation_gets_single_messages() {
    let world = World::new();
    let intake = Intake::new(&world.store, 8);
    world.set(&[StoreCall::Reserve], Fault::Before(StoreErrorKind::Full));
    world.call("a").await.0.unwrap_err();
    let (began, mut messages) = (world.now(), 0);
    while world.now() - began < SECOND * 600 {
        let slot = world.within(SECOND * 60, Box::pin(intake.slot())).await.flatten().expect("a trial");
        assert!(intake.try_slot().is_none(), "two messages at a time");
        world.call("a").await.0.unwrap_err();
        drop(slot);
        messages += 1;
    }
    assert!((100..=260).contains(&messages), "{messages} messages in ten minutes");
    world.set(&[StoreCall::Reserve], Fault::None);
    let slot = world.within(SECOND * 5, Box::pin(intake.slot())).await.flatten();
    world.call("a").await.0.unwrap();
    assert!(slot.is_some() && intake.try_slot().is_some(), "the reservation ends the pause");
}

/// The messages of a trial may make no call, for example because they can't be read.
#[tokio::test]
async fn a_trial_goes_on_with_the_next_message_if_the_first_one_makes_no_call() {
    let world = World::new();
    let intake = Intake::new(&world.store, 8);
    world.set(&[StoreCall::Reserve], AWAY);
    world.call("a").await.0.unwrap_err();
    let before = world.now();
    for _ in 0..3 {
        drop(world.within(Duration::ZERO, Box::pin(intake.slot())).await.flatten().expect("a trial"));
    }
    assert_eq!(world.now(), before);
    // A message that makes its call late does not hold up the other messages either.
    let _late = world.within(Duration::ZERO, Box::pin(intake.slot())).await.flatten().expect("a trial");
    assert!(intake.try_slot().is_none());
    assert!(world.within(SECOND * 2, Box::pin(intake.slot())).await.flatten().is_some());
}

#[tokio::test]
async fn a_stopped_intake_gives_no_slot_and_drains_its_handlers() {
    let world = World::new();
    let intake = Intake::new(&world.store, 1);
    let slot = intake.slot().await.unwrap();
    let mut waiting = Box::pin(intake.slot());
    let mut stopped = Box::pin(intake.stopped());
    assert!(poll_once(waiting.as_mut()).await.is_pending() && poll_once(stopped.as_mut()).await.is_pending());
    let mut drained = Box::pin(intake.drain());
    assert!(poll_once(drained.as_mut()).await.is_pending(), "a handler still runs");
    assert!(waiting.await.is_none());
    stopped.await;
    drop(slot);
    drained.await;
    assert!(intake.slot().await.is_none() && intake.try_slot().is_none());
}

#[tokio::test]
async fn a_stopped_intake_does_not_wait_for_its_store() {
    let world = World::new();
    let intake = Intake::new(&world.store, 1);
    world.set(&[StoreCall::Reserve, StoreCall::Ping], AWAY);
    world.call("a").await.0.unwrap_err();
    let mut waiting = Box::pin(intake.slot());
    assert!(world.within(SECOND, &mut waiting).await.is_none());
    intake.stop();
    assert!(waiting.await.is_none());
    intake.drain().await;
    // The task that pings the store ends with its intake.
    let pings = world.store.count(StoreCall::Ping);
    assert!(world.within(SECOND * 60, Box::pin(std::future::pending::<()>())).await.is_none());
    assert!(world.store.count(StoreCall::Ping) <= pings + 1);
}

#[tokio::test]
async fn the_pauses_of_a_broker_that_fails_grow_until_it_works_for_a_while() {
    let world = World::new();
    let intake = Intake::new(&world.store, 1);
    let pause = async || {
        let began = world.now();
        let goes_on = world.drive(intake.broker_failed("refused")).await;
        (goes_on, world.now() - began)
    };
    let mut longest = Duration::ZERO;
    for _ in 0..20 {
        let (goes_on, pause) = pause().await;
        assert!(goes_on && pause >= Duration::from_millis(50) && pause <= SECOND * 10, "{pause:?}");
        longest = longest.max(pause);
    }
    assert!(longest >= SECOND * 5, "{longest:?}");
    world.clock.advance(SECOND * 11);
    assert!(pause().await.1 <= Duration::from_millis(100));
    intake.stop();
    assert_eq!(pause().await, (false, Duration::ZERO));
}

fn headers(letter: &DeadLetter) -> BTreeMap<&'static str, &str> {
    letter.headers().collect()
}

#[tokio::test]
async fn a_dead_letter_holds_the_reasons_of_its_message() {
    let world = World::new();
    let intake = Intake::new(&world.store, 1);
    let policy = POLICY.max_attempts(1).key_display(KeyDisplay::Prefix(5));
    let failing = || world.operation("order:42", policy).run(async { Err::<u32, Error>(Error::NoAttempt) });
    // The broker does not repeat this delivery.
    let (result, outcome) = observe(failing()).delivery(7).delivery_limit(7).await;
    assert_eq!(outcome.disposition(), Disposition::DeadLetter);
    assert_eq!(outcome.delivery(), Some(7));
    let letter = intake.dead_letter(&result, &outcome);
    let last = headers(&letter);
    assert_eq!(last["idem-why"], "last_delivery");
    assert!(last["idem-error"].starts_with("no attempt runs here"), "{last:?}");
    assert_eq!((last["idem-key"], last["idem-scope"]), ("brokers/order%…", "brokers"));
    assert_eq!((last["idem-attempt"], last["idem-deliveries"]), ("1", "7"));
    assert!(last["idem-time"].ends_with('Z'), "{last:?}");
    assert!(letter.to_string().starts_with("why=\"last_delivery\" error=\"no attempt"), "{letter}");
    // The attempts of the key are used up, and the handler swallows the error.
    let swallows = async {
        let _ = failing().await;
        Ok::<_, Error>(())
    };
    let (result, outcome) = observe(swallows).await;
    assert_eq!((&result.as_ref().ok(), outcome.disposition()), (&Some(&()), Disposition::DeadLetter));
    let letter = intake.dead_letter(&result, &outcome);
    let swallowed = headers(&letter);
    assert_eq!(swallowed["idem-why"], "attempts_exhausted");
    assert!(swallowed["idem-error"].contains("returned a value"), "{swallowed:?}");
    assert!(!swallowed.contains_key("idem-deliveries"));
    let letter = intake.unreadable("line 1:\n not JSON");
    assert_eq!((headers(&letter)["idem-why"], headers(&letter)["idem-error"]), ("unreadable", "line 1:  not JSON"));
    assert!(intake.beyond_limit(7, 7).is_none());
    assert_eq!(headers(&intake.beyond_limit(8, 7).unwrap())["idem-deliveries"], "8");
}

#[tokio::test]
async fn only_a_delivery_that_the_store_failed_says_so() {
    let world = World::new();
    let store_failed = async |call: StoreCall, fault| {
        world.store.always(call, fault);
        let (_, outcome) = world.call(&format!("{call:?}")).await;
        world.store.always(call, Fault::None);
        outcome.store_failed()
    };
    assert!(store_failed(StoreCall::Reserve, AWAY).await);
    assert!(store_failed(StoreCall::Finish, AWAY).await, "unrecorded");
    assert!(!store_failed(StoreCall::Reserve, Fault::Before(StoreErrorKind::Corrupt)).await);
    assert!(!store_failed(StoreCall::Wait, AWAY).await);
    let failing = world.operation("failing", POLICY).run(async { Err::<u32, Error>(Error::NoAttempt) });
    assert!(!observe(failing).await.1.store_failed());
}
