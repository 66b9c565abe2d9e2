//! Course of a test of a fault that concerns messages: racers push messages in their bodies, a broker in the test
//! process counts what arrives, and the audit compares its list with the records.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::outbox::{Resender, UnsentMessages};
use idem_runtime::{Store, StoreExt as _};
use idem_tests::race::messages::{DESTINATIONS, Mode, TcpBroker, TcpSender};
use idem_tests::race::{self, Crew, Event, Keys, Line, Policies, Rules, Work};
use idem_tests::server::until;
use idem_tests::stores;

use crate::Fault;
use crate::rigs::Rig;

/// Number of keys that racers must serve before the store counts as working.
const PROGRESS: usize = 5;
/// First key of the workers that are killed while their messages are sent or marked. The keys before it are those of
/// workers that are killed in their bodies.
const FIRST: usize = 8;
/// Number of keys from [`FIRST`] on that the two other workers serve only at the end.
const VICTIMS: usize = 4;
/// Time within which the store must answer the test itself.
const PATIENCE: Duration = Duration::from_secs(60);
/// Number of refusals after which a message is set aside, as documented.
const MAX_REFUSALS: u32 = 5;

/// Causes `fault` in `rig` while racers send messages, and checks that no message is lost or invented.
pub async fn play(rig: impl Rig, fault: Fault) {
    let mut scene = Scene::open(rig).await;
    let (mut rules, mut set_aside) = (Rules::STRICT, BTreeSet::new());
    match fault {
        Fault::killed_before_sending => {
            let works = [Work::BeforeSending, Work::BeforeSending, Work::Some, Work::Some];
            scene.kill_senders(works).await;
        }
        Fault::killed_before_the_mark => {
            let works = [Work::AfterSending, Work::AfterSending, Work::InMark, Work::InMark];
            scene.kill_senders(works).await;
        }
        Fault::messages_refused => set_aside = scene.messages_are_refused().await,
        Fault::broker_away => scene.broker_is_away().await,
        Fault::store_away_at_the_mark => rules = scene.store_is_away_at_the_mark().await,
        _ => unreachable!("{fault:?}"),
    }
    scene.close(&rules, &set_aside).await;
}

/// Racers at work, whose bodies push messages: two serve key after key, and two are held in bodies that have pushed.
struct Scene<R> {
    rig: R,
    crew: Crew,
    broker: TcpBroker,
    /// Store of the test itself, with a sender, for a resender.
    store: Arc<dyn Store>,
    others: [u32; 2],
    held: [u32; 2],
}

impl<R: Rig> Scene<R> {
    async fn open(rig: R) -> Self {
        let broker = TcpBroker::start();
        let store = stores::open(&rig.spec(), PATIENCE).await.with_sender(TcpSender(broker.port()));
        let mut crew = Crew::new(env!("CARGO_BIN_EXE_racer"), &rig.spec());
        crew.set_env(rig.env());
        crew.orders().policies = Policies::Mixed;
        crew.orders().steps = true;
        crew.orders().broker = Some(broker.port());
        // Key 0 is under `on_crash = retry`, and key 1 under `on_crash = fail`.
        let held = [0, 1].map(|key| crew.start(key, Keys::Together(1), Work::Quiet));
        let others = [(); 2].map(|()| crew.start(FIRST + VICTIMS, Keys::Open, Work::Some));
        let scene = Self { rig, crew, broker, store, others, held };
        scene
            .until("all workers are at work", |lines| {
                let has = |worker: &u32, is: fn(&Event) -> bool| {
                    lines.iter().any(|line| line.worker == *worker && is(&line.event))
                };
                held.iter().all(|worker| has(worker, |event| matches!(event, Event::Began(_))))
                    && others.iter().all(|worker| has(worker, Event::is_final))
            })
            .await;
        scene.progress("all workers serve keys").await;
        scene
    }

    async fn until(&self, what: &str, condition: impl FnMut(&[Line]) -> bool) {
        self.crew.until(what, condition).await;
    }

    /// Waits until workers have served [`PROGRESS`] keys from now on.
    async fn progress(&self, what: &str) {
        let now = race::now();
        let ran = |line: &&Line| line.at > now && matches!(line.event, Event::Ran(_));
        self.until(what, |lines| lines.iter().filter(ran).count() >= PROGRESS).await;
    }

    /// Waits until `worker` writes a line with such an event, without a pause between two looks: the moments that
    /// follow last less than a millisecond.
    fn watch(&self, worker: u32, is: impl Fn(&Event) -> bool) {
        let began = std::time::Instant::now();
        while !self.crew.lines().iter().any(|line| line.worker == worker && is(&line.event)) {
            assert!(began.elapsed() < 2 * PATIENCE, "the worker comes to its messages");
        }
    }

    /// Returns the messages of the record of `key`; `None` if there is no record with messages.
    async fn unsent(&self, key: usize) -> Option<UnsentMessages> {
        self.store.inspect(&race::key(key)).await.expect("answers")?.unsent_messages()
    }

    /// Sends the messages of `key` by a resender, which runs while other workers send theirs.
    async fn resend(&self, key: usize) {
        let resender = Resender::new(&*self.store).older_than(Duration::ZERO).scan();
        until("a resender sends the messages of the record", async || {
            resender.pass().await.expect("the store lists its records");
            self.unsent(key).await.is_none()
        })
        .await;
    }

    /// Delivers the message of `key` to a new worker, until it is acknowledged.
    async fn deliver(&mut self, key: usize) {
        let successor = self.crew.start(key, Keys::Together(1), Work::Some);
        self.until("the next delivery of the key is acknowledged", |lines| {
            lines.iter().any(|line| line.worker == successor && line.event.is_final())
        })
        .await;
    }

    /// Finishes the messages of keys whose workers were killed: by turns by a resender, and by the next delivery.
    async fn recover(&mut self, keys: impl IntoIterator<Item = usize>) {
        for key in keys {
            if key % 2 == 0 {
                self.resend(key).await;
            }
            self.deliver(key).await;
        }
    }

    /// Kills one worker for each of `works`, while the messages of its key are sent or marked.
    async fn kill_senders(&mut self, works: [Work; VICTIMS]) {
        let last = DESTINATIONS.len() - 1;
        for (key, work) in (FIRST..).zip(works) {
            let victim = self.crew.start(key, Keys::Together(1), work);
            self.watch(victim, |event| match work {
                Work::BeforeSending => *event == Event::Sending(0),
                Work::AfterSending => *event == Event::Sent(last),
                Work::InMark => *event == Event::Marking,
                _ => *event == Event::Ended,
            });
            self.crew.kill(victim);
            if work == Work::Some {
                // The worker is killed some moment around the write of its result.
                continue;
            }
            let arrived = if work == Work::BeforeSending { vec![] } else { vec![0, 1, 2] };
            assert_eq!(self.broker.places(key), arrived, "key {key}: the messages that had arrived");
            let unsent = self.unsent(key).await.map_or(0, |unsent| unsent.messages().len());
            // A request that marks the messages may take effect or not.
            let is_possible = unsent == DESTINATIONS.len() || (work == Work::InMark && unsent == 0);
            assert!(is_possible, "key {key}: its record holds {unsent} messages");
        }
        self.recover(FIRST..FIRST + VICTIMS).await;
        self.progress("the others go on").await;
    }

    /// Lets the broker refuse messages: some for a while, and one for ever.
    async fn messages_are_refused(&mut self) -> BTreeSet<usize> {
        let [passing, killed, forever, _] = [0, 1, 2, 3].map(|n| FIRST + n);
        self.broker.refuse(passing, MAX_REFUSALS - 1);
        self.deliver(passing).await;
        self.broker.refuse(killed, MAX_REFUSALS - 1);
        let victim = self.crew.start(killed, Keys::Together(1), Work::Some);
        let refused = |line: &&Line| line.event == Event::Unsent("refused".to_owned());
        self.until("the broker refuses a message of the worker", |lines| {
            lines.iter().filter(refused).any(|line| line.worker == victim)
        })
        .await;
        self.crew.kill(victim);
        self.deliver(killed).await;
        self.broker.refuse(forever, u32::MAX);
        self.deliver(forever).await;
        let lines = self.crew.lines();
        let refusals = |key| lines.iter().filter(refused).filter(|line| line.key == key).count();
        let before_the_last = MAX_REFUSALS as usize - 1;
        assert_eq!(refusals(passing), before_the_last, "the deliveries that were not acknowledged");
        // The delivery that sets the message aside is acknowledged. A refusal is not counted if its mark fails.
        assert!(refusals(forever) >= before_the_last, "the deliveries that were not acknowledged");
        let arrived: HashSet<usize> = self.broker.places(forever).into_iter().collect();
        assert_eq!(arrived, [1, 2].into(), "the message that is refused holds up no other for ever");
        let kept = self.unsent(forever).await.expect("the record keeps the message");
        let kept: Vec<_> = kept.messages().iter().map(|it| (it.refusals(), it.is_set_aside())).collect();
        assert_eq!(kept, [(MAX_REFUSALS, true)], "the message is set aside");
        self.broker.refuse(forever, 0);
        let key = race::key(forever);
        let found = self.store.inspect(&key).await.expect("answers").expect("recorded");
        self.store.operator().resend_messages(&key, &found).await.expect("the record has not changed");
        self.resend(forever).await;
        self.progress("the others go on").await;
        [forever].into()
    }

    /// Cuts the broker off, and lets it lose its answers. One worker is killed each time.
    async fn broker_is_away(&mut self) {
        for (key, mode) in (FIRST..).zip([Mode::Away, Mode::LosesAnswers, Mode::Away, Mode::LosesAnswers]) {
            self.broker.set(mode);
            let now = race::now();
            let victim = self.crew.start(key, Keys::Together(1), Work::Some);
            let workers = [victim, self.others[0], self.others[1]];
            self.until("no worker can send its messages", |lines| {
                let is_unsent = |event: &Event| matches!(event, Event::Unsent(_));
                workers.iter().all(|worker| {
                    lines.iter().any(|line| line.worker == *worker && line.at > now && is_unsent(&line.event))
                })
            })
            .await;
            self.crew.kill(victim);
            assert!(self.unsent(key).await.is_some(), "the record of key {key} holds its messages");
            self.broker.set(Mode::Confirms);
            self.recover([key]).await;
            self.progress("all goes on after the outage of the broker").await;
        }
    }

    /// Takes the store away from workers that have sent their messages and not marked them. Half of the workers are
    /// killed before the store returns.
    async fn store_is_away_at_the_mark(&mut self) -> Rules {
        let keys = FIRST..FIRST + VICTIMS;
        let workers: Vec<u32> =
            keys.clone().map(|key| self.crew.start(key, Keys::Together(1), Work::AfterSending)).collect();
        let last = Event::Sent(DESTINATIONS.len() - 1);
        let all_have = |lines: &[Line], event: &Event| {
            workers.iter().all(|worker| lines.iter().any(|line| line.worker == *worker && line.event == *event))
        };
        self.until("the workers have sent their messages", |lines| all_have(lines, &last)).await;
        let fault = self.rig.away();
        self.rig.break_down(fault).await;
        let from = race::now();
        for worker in &workers {
            self.crew.open_gate(*worker);
        }
        let not_marked = Event::Unsent("not-marked".to_owned());
        self.until("the store does not confirm the marks", |lines| all_have(lines, &not_marked)).await;
        let lines = self.crew.lines();
        let early = lines.iter().find(|line| workers.contains(&line.worker) && line.event.is_final());
        assert_eq!(early, None, "the input was acknowledged before its messages were marked");
        for worker in &workers[VICTIMS / 2..] {
            self.crew.kill(*worker);
        }
        let to = race::now();
        self.rig.heal(fault).await;
        self.until("the workers that were not killed have marked their messages", |lines| {
            let has_ended = |worker| lines.iter().any(|line| line.worker == worker && line.event.is_final());
            workers[..VICTIMS / 2].iter().all(|worker| has_ended(*worker))
        })
        .await;
        self.recover(keys.skip(VICTIMS / 2)).await;
        self.progress("all goes on after the fault").await;
        Rules { stopped: Some((from, to)), ..Rules::STRICT }
    }

    /// Ends the race. The workers that are held in their bodies are killed first: their messages must never arrive.
    async fn close(mut self, rules: &Rules, set_aside: &BTreeSet<usize>) {
        for worker in self.held {
            self.crew.kill(worker);
        }
        let keys = self.crew.finish();
        self.crew.ended().await;
        let effects = self.crew.audit(keys, rules).await;
        println!("{keys} keys, {} effects beyond one for each", effects.repeated());
        let lines = self.crew.lines();
        let has = |event: &Event| lines.iter().any(|line| line.event == *event);
        assert!(has(&Event::Failed), "no body failed after it had pushed its messages");
        assert!(
            effects.0[0].len() > 1 && self.broker.places(1).is_empty(),
            "two bodies were killed after their pushes"
        );
        self.crew.audit_messages(keys, &*self.store, &self.broker, set_aside).await;
    }
}
