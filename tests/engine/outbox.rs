//! The outbox: messages are recorded with the result, sent after that, and then marked as sent.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use idem_runtime::StoreExt as _;
use idem_runtime::operator::Resolution;
use idem_runtime::outbox::{OutboxProblem, OutgoingMessage, Resender, SendError, SendFuture, Sender, UnsentReason};
use idem_runtime::store::{StoreContext, UnsentMessages, forward};

use super::super::*;

/// Answer of the broker to one message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Confirm,
    /// The message arrives, and the answer gets lost.
    Lose,
    Fail,
    Refuse,
    Hang,
}

#[derive(Default, Debug)]
struct Messages {
    /// Messages that have arrived: destination, id and body.
    arrived: Vec<(String, String, String)>,
    /// Answers to the next messages; `Confirm` after the last of them.
    answers: VecDeque<Answer>,
}

/// A broker that counts, and fails on command.
#[derive(Clone, Default, Debug)]
struct Broker(Arc<Mutex<Messages>>);

impl Broker {
    fn answers(&self, answers: impl IntoIterator<Item = Answer>) {
        self.0.lock().unwrap().answers.extend(answers);
    }

    /// Returns the bodies of the messages that have arrived.
    fn arrived(&self) -> Vec<String> {
        self.0.lock().unwrap().arrived.iter().map(|(.., body)| body.clone()).collect()
    }

    /// Returns the number of different ids of the messages with this body.
    fn ids(&self, body: &str) -> usize {
        let messages = self.0.lock().unwrap();
        let ids: std::collections::BTreeSet<_> =
            messages.arrived.iter().filter(|(.., it)| it == body).map(|(_, id, _)| id).collect();
        ids.len()
    }
}

impl Sender for Broker {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let answer = {
                let mut messages = self.0.lock().unwrap();
                let answer = messages.answers.pop_front().unwrap_or(Answer::Confirm);
                if matches!(answer, Answer::Confirm | Answer::Lose) {
                    let body = String::from_utf8(message.body().to_vec()).unwrap();
                    messages.arrived.push((message.destination().to_owned(), message.id().to_owned(), body));
                }
                answer
            };
            match answer {
                Answer::Confirm => Ok(()),
                Answer::Lose | Answer::Fail => Err("the broker is away".into()),
                Answer::Refuse => Err(SendError::refused("too large")),
                Answer::Hang => std::future::pending().await,
            }
        })
    }

    fn max_refusals(&self) -> u32 {
        3
    }
}

/// The store as another process sees it, with leases and a sender of its own.
#[derive(Debug)]
struct Peer {
    inner: MemoryStore,
    context: StoreContext,
    this: std::sync::Weak<Self>,
}

impl Store for Peer {
    forward! { |store| store.inner => namespace, response_timeout, reserve, begin, renew, append, step_values, finish, release, wait, inspect, decide, purge, list, ping }

    fn handle(&self) -> Arc<dyn Store> {
        self.this.upgrade().unwrap()
    }

    fn upkeep(&self) -> Arc<dyn Store> {
        self.handle()
    }

    fn context(&self) -> &StoreContext {
        &self.context
    }
}

impl World {
    /// Returns the same world in another process, whose store handle has no sender.
    fn peer(&self) -> Self {
        let context = StoreContext::in_process("memory", Arc::new(self.clock.clone()));
        let peer = Arc::new_cyclic(|this| Peer { inner: self.memory.clone(), context, this: this.clone() });
        Self {
            clock: self.clock.clone(),
            memory: self.memory.clone(),
            store: FaultyStore::new(&peer),
            runs: AtomicU32::new(0),
        }
    }

    fn with_broker() -> (Self, Broker) {
        let (world, broker) = (Self::new(), Broker::default());
        let store = world.store.clone().with_sender(broker.clone());
        (Self { store, ..world }, broker)
    }

    /// Makes a call whose body pushes these messages: destinations and bodies.
    async fn publish(&self, policy: Policy, messages: &[(&str, &'static str)]) -> (Result<u32, Error>, Outcome) {
        let body = async {
            let number = self.body().await?;
            for (destination, body) in messages {
                current()?.outbox().push(destination, OutgoingMessage::new(*body))?;
            }
            Ok(number)
        };
        observe(self.operation(policy).run(body)).await
    }

    /// Returns the messages in the record that are not marked as sent.
    async fn unsent(&self) -> Vec<String> {
        let found = self.store.inspect(&Self::key("k")).await.unwrap().unwrap();
        let bodies = |messages: &UnsentMessages| {
            let bodies = messages.messages().iter().map(|it| String::from_utf8(it.message().body().to_vec()).unwrap());
            bodies.collect()
        };
        found.unsent_messages().map(|messages| bodies(&messages)).unwrap_or_default()
    }
}

fn reason(result: Result<u32, Error>) -> UnsentReason {
    match result {
        Err(Error::Unsent { reason, .. }) => *reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn messages_leave_after_the_record_and_once() {
    let (world, broker) = World::with_broker();
    let (result, outcome) = world.publish(POLICY, &[("a", "1"), ("b", "2"), ("a", "3")]).await;
    assert_eq!((result.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!(broker.arrived(), ["1", "2", "3"]);
    assert_eq!(world.store.count(StoreCall::Decide), 1, "one write marks all messages");
    let (result, outcome) = world.publish(POLICY, &[("a", "1")]).await;
    assert!(outcome.replayed());
    assert_eq!((result.unwrap(), world.runs(), broker.arrived().len()), (1, 1, 3));
    assert_eq!(world.store.count(StoreCall::Reserve), 2, "a replay costs one call of the store");
}

#[tokio::test]
async fn a_handler_without_messages_makes_no_further_write() {
    let (world, _) = World::with_broker();
    world.call(POLICY).await.0.unwrap();
    assert_eq!(world.store.count(StoreCall::Decide), 0);
}

#[tokio::test]
async fn nothing_is_sent_for_a_body_that_failed_was_dropped_or_lost_its_lease() {
    let (world, broker) = World::with_broker();
    let push = |body| current()?.outbox().push("a", OutgoingMessage::new(body));
    let failing = async {
        push("failed")?;
        Err::<u32, _>(Error::NoAttempt)
    };
    world.operation(POLICY).run(failing).await.unwrap_err();
    let recorded = async {
        push("recorded error").unwrap();
        Err::<u32, _>(Failure::Declined(7))
    };
    let other = Operation::new(&world.store, Ok(World::key("other")), POLICY);
    other.record_errors().run(recorded).await.unwrap_err();
    {
        let dropped = world.operation(POLICY).run(async {
            push("dropped")?;
            std::future::pending::<Result<u32, Error>>().await
        });
        assert!(poll_once(pin!(dropped)).await.is_pending());
    }
    let lost = async {
        push("lost")?;
        let found = world.memory.inspect(&World::key("k")).await.unwrap().unwrap();
        let _ = world.memory.decide(&Decision::break_lease(&World::key("k"), &found)).await.unwrap();
        world.body().await
    };
    assert!(matches!(world.operation(POLICY).run(lost).await, Err(Error::LeaseLost { .. })));
    assert!(broker.arrived().is_empty());
    world.publish(POLICY, &[("a", "at last")]).await.0.unwrap();
    assert_eq!(broker.arrived(), ["at last"]);
}

#[tokio::test]
async fn the_input_is_acknowledged_only_after_its_messages_are_sent() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Confirm, Answer::Fail, Answer::Fail, Answer::Lose]);
    let (result, outcome) = world.publish(POLICY, &[("a", "1"), ("a", "2"), ("a", "3")]).await;
    let Err(Error::Unsent { attempt: 1, ran: true, unsent: Some(2), retry_after, .. }) = result else {
        panic!("{result:?}")
    };
    assert_eq!(outcome.disposition(), Disposition::Retry { after: retry_after });
    assert!(outcome.executed() && outcome.recorded() && !outcome.uncertain());
    assert_eq!((broker.arrived(), world.unsent().await), (vec!["1".into()], vec!["2".into(), "3".into()]));
    for _ in 0..2 {
        let (result, outcome) = world.publish(POLICY, &[]).await;
        assert!(matches!(result, Err(Error::Unsent { ran: false, unsent: Some(2), .. })), "{result:?}");
        assert!(!outcome.executed() && outcome.recorded());
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    }
    let (result, outcome) = world.publish(POLICY, &[]).await;
    assert_eq!((result.unwrap(), outcome.disposition(), world.runs()), (1, Disposition::Ack, 1));
    // The broker got message 2 twice, once without an answer: under one id.
    assert_eq!((broker.arrived(), broker.ids("2")), (["1", "2", "2", "3"].map(String::from).to_vec(), 1));
    assert!(world.unsent().await.is_empty());
}

#[tokio::test]
async fn one_destination_does_not_hold_up_another_and_keeps_its_order() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Fail]);
    let messages = [("a", "a1"), ("b", "b1"), ("a", "a2"), ("b", "b2")];
    world.publish(POLICY, &messages).await.0.unwrap_err();
    assert_eq!(broker.arrived(), ["b1", "b2"]);
    world.publish(POLICY, &messages).await.0.unwrap();
    assert_eq!(broker.arrived(), ["b1", "b2", "a1", "a2"]);
}

#[tokio::test]
async fn a_broker_that_hangs_is_left_after_a_time() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Hang]);
    let call = world.publish(POLICY, &[("a", "1")]);
    let time = async {
        settle().await;
        world.clock.advance(Duration::from_secs(11));
    };
    let ((result, _), ()) = futures::join!(call, time);
    assert!(matches!(reason(result), UnsentReason::TimedOut { .. }));
    world.publish(POLICY, &[]).await.0.unwrap();
    assert_eq!(broker.arrived(), ["1"]);
}

#[tokio::test]
async fn a_refused_message_is_set_aside_after_its_attempts() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Refuse; 3]);
    for _ in 0..2 {
        let (result, _) = world.publish(POLICY, &[("a", "bad"), ("a", "good")]).await;
        assert!(matches!(reason(result), UnsentReason::NotConfirmed { refused: true, .. }));
    }
    let (result, outcome) = world.publish(POLICY, &[]).await;
    assert_eq!(
        (result.unwrap(), outcome.disposition()),
        (1, Disposition::Ack),
        "the message no longer holds up the input"
    );
    assert_eq!((broker.arrived(), world.unsent().await), (vec!["good".into()], vec!["bad".into()]));
    // The record keeps it, and no delivery sends it.
    assert!(world.publish(POLICY, &[]).await.1.replayed());
    assert_eq!(broker.arrived(), ["good"]);
    let found = world.store.inspect(&World::key("k")).await.unwrap().unwrap();
    let kept = found.unsent_messages().unwrap();
    assert!(kept.messages()[0].is_set_aside());
    assert_eq!(kept.messages()[0].refusals(), 3);
}

#[tokio::test]
async fn messages_are_sent_again_if_the_mark_is_lost() {
    let (world, broker) = World::with_broker();
    world.store.next(StoreCall::Decide, Fault::Before(StoreErrorKind::Unavailable));
    let (result, _) = world.publish(POLICY, &[("a", "1")]).await;
    assert!(matches!(reason(result), UnsentReason::NotMarked(_)));
    assert!(world.publish(POLICY, &[]).await.1.replayed());
    assert_eq!((broker.arrived().len(), broker.ids("1")), (2, 1));
}

/// A broker that is away once, and keeps the messages as they are.
#[derive(Clone, Default)]
struct Keeping(Arc<Mutex<(u32, Vec<OutgoingMessage>)>>);

impl Sender for Keeping {
    fn send<'a>(&'a self, message: &'a OutgoingMessage) -> SendFuture<'a> {
        Box::pin(async move {
            let (tries, kept) = &mut *self.0.lock().unwrap();
            *tries += 1;
            if *tries == 1 {
                return Err("the broker is away".into());
            }
            kept.push(message.clone());
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_message_from_the_record_is_the_message_that_was_pushed() {
    let headers = [
        ("a-1", "a-b"),
        ("a-2", "ɤϡ֎ᾣ♥ 😍 奥曼克 தமிழ் ٩(-̮̮̃-̃)۶"),
        ("ɤϡ♥-😅", "line\r\nline\0"),
        ("", ""),
        ("twice", "1"),
        ("twice", "2"),
    ];
    let (world, broker) = (World::new(), Keeping::default());
    let world = World { store: world.store.clone().with_sender(broker.clone()), ..world };
    let message =
        headers.into_iter().fold(OutgoingMessage::new(vec![0, 255, 10]), |it, (name, value)| it.header(name, value));
    let message = message.key("ключ / 42");
    let body = async {
        current()?.outbox().push("orders/é *>#", message.clone())?;
        world.body().await
    };
    let (result, _) = observe(world.operation(POLICY).run(body)).await;
    assert!(matches!(reason(result), UnsentReason::NotConfirmed { .. }));
    world.publish(POLICY, &[]).await.0.unwrap();
    let kept = broker.0.lock().unwrap().1.clone();
    let expected = message.addressed("orders/é *>#", kept[0].id());
    assert_eq!(kept, [expected]);
    assert_eq!(kept[0].headers().collect::<Vec<_>>(), headers);
}

#[tokio::test]
async fn a_call_that_is_dropped_while_it_sends_leaves_its_messages_to_the_next() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Confirm, Answer::Hang]);
    {
        let call = pin!(world.publish(POLICY, &[("a", "1"), ("a", "2")]));
        assert!(poll_once(call).await.is_pending());
    }
    assert_eq!(world.unsent().await, ["1", "2"]);
    world.publish(POLICY, &[]).await.0.unwrap();
    assert_eq!((broker.arrived(), broker.ids("1")), (["1", "1", "2"].map(String::from).to_vec(), 1));
}

#[tokio::test]
async fn duplicates_in_this_process_do_not_send_what_another_call_is_sending() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Hang]);
    let mut first = Box::pin(world.publish(POLICY, &[("a", "1")]));
    assert!(poll_once(first.as_mut()).await.is_pending());
    let (result, outcome) = world.publish(POLICY, &[]).await;
    assert!(matches!(reason(result), UnsentReason::Sending));
    assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    let wait = POLICY.in_progress(InProgress::Wait(Duration::from_secs(60)));
    let mut waiting = Box::pin(world.publish(wait, &[]));
    assert!(poll_once(waiting.as_mut()).await.is_pending());
    drop(first);
    let time = async {
        for _ in 0..3 {
            settle().await;
            world.clock.advance(Duration::from_secs(1));
        }
    };
    let ((result, outcome), ()) = futures::join!(waiting, time);
    assert_eq!((result.unwrap(), outcome.waited(), outcome.replayed()), (1, true, true));
    assert_eq!((broker.arrived(), world.runs()), (vec!["1".to_owned()], 1));
}

#[tokio::test]
async fn a_store_handle_without_a_sender_accepts_no_message_and_loses_none() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Fail]);
    world.publish(POLICY, &[("a", "1")]).await.0.unwrap_err();
    // Another process, whose store handle has no sender.
    let without = world.peer();
    let (result, outcome) = without.publish(POLICY, &[]).await;
    assert!(matches!(reason(result), UnsentReason::NoSender));
    assert!(outcome.misconfigured() && matches!(outcome.disposition(), Disposition::Retry { .. }));
    let other = Operation::new(&without.store, Ok(World::key("other")), POLICY);
    let pushed = other.run(async { current()?.outbox().push("a", OutgoingMessage::new("2")) }).await;
    assert!(matches!(pushed, Err(Error::Outbox { problem: OutboxProblem::NoSender, .. })), "{pushed:?}");
    world.publish(POLICY, &[]).await.0.unwrap();
    assert_eq!(broker.arrived(), ["1"]);
}

#[tokio::test]
async fn messages_that_no_record_holds_are_told_before_they_are_accepted() {
    let (world, broker) = World::with_broker();
    let large = vec![b'x'; 300 * 1024];
    let body = async {
        let outbox = current()?;
        let outbox = outbox.outbox();
        let refused = |problem: Result<(), Error>| match problem {
            Err(Error::Outbox { problem, .. }) => problem,
            other => panic!("{other:?}"),
        };
        let too_large = refused(outbox.push("a", OutgoingMessage::new(large)));
        assert!(matches!(too_large, OutboxProblem::TooLarge { max: 262_144, .. }), "{too_large:?}");
        assert!(matches!(refused(outbox.push("", OutgoingMessage::new("x"))), OutboxProblem::NoDestination));
        outbox.push("a", OutgoingMessage::new("small"))?;
        current()
    };
    let mut attempt = None;
    let keeping = async {
        attempt = Some(body.await?);
        Ok::<_, Error>(1)
    };
    world.operation(POLICY).run(keeping).await.unwrap();
    let late = attempt.unwrap().outbox().push("a", OutgoingMessage::new("late"));
    assert!(matches!(late, Err(Error::Outbox { problem: OutboxProblem::AttemptEnded, .. })), "{late:?}");
    assert_eq!(broker.arrived(), ["small"]);
}

#[tokio::test]
async fn a_result_that_can_not_be_stored_does_not_lose_the_messages() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Fail]);
    let (result, _) = world.publish(POLICY.max_result_bytes(0), &[("a", "1")]).await;
    assert!(matches!(result, Err(Error::Unsent { .. })), "{result:?}");
    let (result, _) = world.publish(POLICY, &[]).await;
    assert!(matches!(result, Err(Error::ResultUnavailable { .. })), "{result:?}");
    assert_eq!(broker.arrived(), ["1"]);
    assert_eq!(world.state().await, State::Completed(StoredResult::TooLarge { size: 1 }));
}

#[tokio::test]
async fn without_a_reservation_messages_leave_after_the_body_on_each_delivery() {
    for policy in [POLICY.mode(Mode::Off), POLICY.mode(Mode::Shadow), POLICY.on_store_error(OnStoreError::Run)] {
        let (world, broker) = World::with_broker();
        if matches!(policy.current_mode(), Mode::Enforce) {
            world.store.always(StoreCall::Reserve, Fault::Before(StoreErrorKind::Misconfigured));
        }
        for number in [1, 2] {
            let (result, outcome) = world.publish(policy, &[("a", "1")]).await;
            assert_eq!((result.unwrap(), outcome.disposition()), (number, Disposition::Ack), "{policy:?}");
        }
        assert_eq!(broker.arrived(), ["1", "1"], "{policy:?}");
        assert_eq!(broker.ids("1"), 1);
        broker.answers([Answer::Fail]);
        let (result, outcome) = world.publish(policy, &[("a", "2")]).await;
        assert!(matches!(result, Err(Error::Unsent { ran: true, .. })), "{policy:?}: {result:?}");
        assert!(matches!(outcome.disposition(), Disposition::Retry { .. }));
    }
}

#[tokio::test]
async fn an_operator_who_replaces_a_result_keeps_the_messages() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Fail]);
    world.publish(POLICY, &[("a", "1")]).await.0.unwrap_err();
    let key = World::key("k");
    let operator = world.store.operator().by("alice");
    let found = operator.inspect(&key).await.unwrap().unwrap();
    operator.replace(&key, &found, Resolution::completed(&7_u32).unwrap()).await.unwrap();
    let (result, outcome) = world.publish(POLICY, &[]).await;
    assert_eq!((result.unwrap(), outcome.replayed(), broker.arrived()), (7, true, vec!["1".to_owned()]));
    assert_eq!(world.record().await.unwrap().provenance.decided_by(), Some("alice"));
}

#[tokio::test]
async fn a_finish_whose_answer_was_lost_is_recognised_after_another_call_has_marked_its_messages() {
    let (world, broker) = World::with_broker();
    world.store.next(StoreCall::Finish, Fault::After);
    // A duplicate in another process sends and marks while this call repeats its write.
    let other = world.peer();
    let other = World { store: other.store.clone().with_sender(broker.clone()), ..other };
    let time = async {
        settle().await;
        other.publish(POLICY, &[]).await.0.unwrap();
        for _ in 0..20 {
            settle().await;
            world.clock.advance(Duration::from_millis(100));
        }
    };
    let ((result, outcome), ()) = futures::join!(world.publish(POLICY, &[("a", "1")]), time);
    assert_eq!((result.unwrap(), outcome.disposition()), (1, Disposition::Ack));
    assert_eq!((broker.ids("1"), world.unsent().await.len()), (1, 0));
}

#[tokio::test]
async fn a_message_that_can_not_leave_any_more_is_not_accepted() {
    let (world, broker) = World::with_broker();
    // A task of the body pushes while the result is being written.
    world.store.next(StoreCall::Finish, Fault::Slow(3));
    let attempt = Rc::new(std::cell::RefCell::new(None));
    let body = async {
        *attempt.borrow_mut() = Some(current()?);
        world.body().await
    };
    let mut call = pin!(world.operation(POLICY).run(body));
    assert!(poll_once(call.as_mut()).await.is_pending());
    let pushed = attempt.borrow().as_ref().unwrap().outbox().push("a", OutgoingMessage::new("late"));
    assert!(matches!(pushed, Err(Error::Outbox { problem: OutboxProblem::AttemptEnded, .. })), "{pushed:?}");
    call.await.unwrap();
    assert!(broker.arrived().is_empty());
}

#[tokio::test]
async fn a_push_inside_of_a_step_is_refused_and_does_not_end_the_operation() {
    let (world, broker) = World::with_broker();
    let body = async {
        let attempt = current()?;
        let charge = attempt.step("charge").run(async |_| {
            current()?.outbox().push("a", OutgoingMessage::new("1"))?;
            Ok::<_, Error>(1)
        });
        Ok::<u32, Failure>(charge.await?)
    };
    let (result, _) = observe(world.operation(POLICY).record_errors_if(|_: &Failure| OnError::Record).run(body)).await;
    assert!(format!("{result:?}").contains("inside of a step"), "{result:?}");
    assert_eq!(world.state().await, State::Released, "a mistake of the deployment ends no operation");
    assert!(broker.arrived().is_empty());
}

#[tokio::test]
async fn messages_leave_if_the_encoding_of_the_result_panics() {
    struct Explosive;
    impl Serialize for Explosive {
        fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
            panic!("the result does not encode")
        }
    }
    impl<'de> Deserialize<'de> for Explosive {
        fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
            Ok(Self)
        }
    }
    let (world, broker) = World::with_broker();
    let body = async {
        current()?.outbox().push("a", OutgoingMessage::new("1"))?;
        Ok::<_, Error>(Explosive)
    };
    let call = std::panic::AssertUnwindSafe(world.operation(POLICY).run(body));
    assert!(futures::FutureExt::catch_unwind(call).await.is_err());
    settle().await;
    assert_eq!(world.unsent().await, ["1"]);
    let (result, _) = world.publish(POLICY, &[]).await;
    assert!(matches!(result, Err(Error::ResultUnavailable { .. })), "{result:?}");
    assert_eq!(broker.arrived(), ["1"]);
}

#[tokio::test]
async fn a_resender_sends_what_no_delivery_sends() {
    let (world, broker) = World::with_broker();
    broker.answers([Answer::Fail, Answer::Fail]);
    world.publish(POLICY, &[("a", "1")]).await.0.unwrap_err();
    world.clock.advance(Duration::from_secs(60));
    let resender = Resender::new(&world.store);
    let failed = resender.pass().await.unwrap();
    assert_eq!((failed.done, failed.failed, failed.skipped), (0, 1, 0));
    let peer = world.peer();
    let peer = World { store: peer.store.clone().with_sender(broker.clone()), ..peer };
    let done = Resender::new(&peer.store).pass().await.unwrap();
    assert_eq!((done.done, done.failed, done.skipped), (1, 0, 0));
    assert_eq!((broker.arrived(), broker.ids("1")), (vec!["1".to_owned()], 1));
    assert_eq!(resender.pass().await.unwrap(), idem_runtime::outbox::Resent::default());
    // A young record is left to its call.
    broker.answers([Answer::Fail]);
    let other = Operation::new(&world.store, Ok(World::key("young")), POLICY);
    let body = async {
        current()?.outbox().push("a", OutgoingMessage::new("2"))?;
        Ok::<_, Error>(1)
    };
    other.run(body).await.unwrap_err();
    assert_eq!(resender.pass().await.unwrap(), idem_runtime::outbox::Resent::default());
    assert!(world.publish(POLICY, &[]).await.1.replayed());
}
