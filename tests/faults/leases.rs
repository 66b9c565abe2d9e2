//! Faults during which only leases of the affected keys may lapse. Bodies go on while their processes, runtimes, lines
//! and stores are disturbed, and waiting duplicates would take over a lapsed lease.

use std::cell::Cell;
use std::collections::HashSet;
use std::time::{Duration, Instant};

use idem_runtime::{Error, Key, Operation, Policy};
use idem_tests::proxy::Line;
use idem_tests::race::{self, Crew, Event, Keys, Place, Policies, Rules, Work};
use idem_tests::stores;

use crate::Fault;
use crate::rigs::{Rig, set_all};

/// Number of bodies that a process holds concurrently.
pub const HELD: usize = 6;
/// Least number of calls, one after the other, that must fit into a lease at the machine's present speed.
const CALLS_IN_A_LEASE: u32 = 30;
const LONGEST_LEASE: Duration = Duration::from_secs(3);
/// Largest number of rounds of a scene on a server that answers too late to judge a round.
const ROUNDS: usize = 5;
/// Time for which the fault `full_for_a_moment` keeps a store full or read-only.
const MOMENT: Duration = Duration::from_millis(500);

/// Causes `fault` in `rig`, and checks that only leases of affected keys are lost.
pub async fn play(rig: impl Rig, fault: Fault) {
    let mut scene = Scene::new(rig).await;
    match fault {
        Fault::threads_exhausted => scene.threads_exhausted().await,
        Fault::descriptors_exhausted => scene.descriptors_exhausted().await,
        Fault::threads_blocked => scene.threads_blocked().await,
        Fault::runtimes_stand_still => scene.runtimes_stand_still().await,
        // Boxed: the future is large.
        Fault::process_forked => Box::pin(scene.process_forked()).await,
        Fault::bodies_paused => scene.bodies_paused().await,
        Fault::lines_slow => scene.lines_slow().await,
        Fault::record_locked => scene.record_locked().await,
        Fault::insert_uncommitted => scene.insert_uncommitted().await,
        Fault::node_stopped => scene.node_stopped().await,
        Fault::full_for_a_moment => scene.full_for_a_moment().await,
        Fault::renewals_refused => scene.renewals_refused().await,
        _ => unreachable!("{fault:?}"),
    }
}

pub struct Scene<R> {
    pub rig: R,
    pub crew: Crew,
}

impl<R: Rig> Scene<R> {
    pub async fn new(rig: R) -> Self {
        let mut crew = Crew::new(env!("CARGO_BIN_EXE_racer"), &rig.spec());
        crew.set_env(rig.env());
        crew.orders().policies = Policies::Mixed;
        let pace = CALLS_IN_A_LEASE * longest_call(&rig.spec()).await;
        let lease = pace.clamp(crew.orders().lease, LONGEST_LEASE);
        crew.orders().lease = lease;
        Self { rig, crew }
    }

    pub fn lease(&mut self) -> Duration {
        self.crew.orders().lease
    }

    /// Starts a process that holds the bodies of the keys from `begin` on, and a second process that delivers the same
    /// messages until they are acknowledged. Returns once all bodies have begun and a duplicate has come.
    pub async fn hold(&mut self, begin: usize, keys: Keys, work: Work, place: Place) -> u32 {
        self.crew.orders().place = place;
        let holder = self.crew.start(begin, keys, work);
        self.crew.orders().place = Place::One;
        self.crew.set_wrapper(Vec::new());
        let (Keys::Together(count) | Keys::Beside(count, _)) = keys else { unreachable!("side by side: {keys:?}") };
        let begin = if place == Place::BegunElsewhere { begin + 1 } else { begin };
        self.crew
            .until("the bodies have begun", |lines| {
                let of = |key| move |line: &race::Line| line.key == key && matches!(line.event, Event::Began(_));
                (begin..begin + count).all(|key| lines.iter().any(of(key)))
            })
            .await;
        let duplicates = self.crew.start(begin, Keys::Together(count), Work::Some);
        self.crew.until("duplicates have come", |lines| lines.iter().any(|line| line.worker == duplicates)).await;
        holder
    }

    /// Waits until all processes have ended. Returns the numbers of the attempts that took effect, for each key.
    async fn ended(&mut self, keys: usize) -> Vec<Vec<u32>> {
        self.crew.ended().await;
        self.crew.audit(keys, &Rules::STRICT).await.0
    }

    /// Returns the answers to the calls that `worker` began after `since`, each with its key.
    pub fn told(&self, worker: u32, since: u64) -> Vec<(usize, Event)> {
        let lines = self.crew.lines();
        let of_worker = || lines.iter().filter(|line| line.worker == worker);
        let asked = of_worker().filter(|line| line.event == Event::Asked && line.at > since);
        let calls: HashSet<u32> = asked.map(|line| line.call).collect();
        let told = of_worker().filter(|line| line.event.ends_a_call() && calls.contains(&line.call));
        told.map(|line| (line.key, line.event.clone())).collect()
    }

    /// Opens the gates of `holders`, waits until all processes have ended, and checks that one body ran for each of
    /// `keys`. `all` is the number of all keys.
    pub async fn ran_once(&mut self, holders: &[u32], keys: impl IntoIterator<Item = usize>, all: usize) {
        if let Some(problem) = self.ran_again(holders, keys, all).await {
            panic!("{problem}");
        }
    }

    /// Like [`ran_once`](Self::ran_once), but returns the problem if another body ran for one of `keys`.
    async fn ran_again(
        &mut self,
        holders: &[u32],
        keys: impl IntoIterator<Item = usize>,
        all: usize,
    ) -> Option<String> {
        for holder in holders {
            self.crew.open_gate(*holder);
        }
        let effects = self.ended(all).await;
        let lines = self.crew.lines();
        // A server that gets no processor time for a lease records no result, so the body of such a key may run again.
        let unrecorded = |key| lines.iter().any(|line| line.key == key && line.event == Event::Unrecorded);
        let interrupted = |key| lines.iter().any(|line| line.key == key && line.event == Event::Interrupted);
        let again = |key: &usize| (effects[*key].len() != 1 || interrupted(*key)) && !unrecorded(*key);
        let again: Vec<usize> = keys.into_iter().filter(again).collect();
        let lines: Vec<_> = lines.iter().filter(|line| again.contains(&line.key)).collect();
        let lines: Vec<_> = lines.iter().map(ToString::to_string).collect();
        let lines = lines.join("\n");
        (!again.is_empty()).then(|| format!("these keys were taken over or interrupted: {again:?}\n{lines}"))
    }

    async fn threads_blocked(&mut self) {
        let one = self.hold(0, Keys::Together(1), Work::Blocks, Place::One).await;
        let two = self.hold(1, Keys::Together(2), Work::BlocksInPlace, Place::One).await;
        tokio::time::sleep(10 * self.lease()).await;
        self.ran_once(&[one, two], 0..3, 3).await;
    }

    async fn runtimes_stand_still(&mut self) {
        let one = self.hold(0, Keys::Together(2), Work::Quiet, Place::OpenedElsewhere).await;
        let two = self.hold(2, Keys::Together(2), Work::Quiet, Place::BegunElsewhere).await;
        tokio::time::sleep(10 * self.lease()).await;
        self.ran_once(&[one, two], 0..5, 5).await;
    }

    async fn process_forked(&mut self) {
        self.crew.orders().place = Place::Forked;
        let keys = 1 + 4 * HELD;
        let (spec, lease) = (self.rig.spec(), self.lease());
        let mut problem = None;
        for round in 0..ROUNDS {
            let begin = round * keys;
            self.crew.start(begin, Keys::Together(HELD), Work::Long);
            let slowest = Cell::new(Duration::ZERO);
            problem = tokio::select! {
                problem = self.ran_again(&[], begin..begin + keys, begin + keys) => problem,
                () = watch(&spec, &slowest) => unreachable!("the watching future never ends"),
            };
            // Three processes load the server. If it answers this process too late, renewals come too late as well.
            if problem.is_none() || slowest.get() < lease / 3 {
                break;
            }
            println!("an answer took {:?}, so this round judges nothing", slowest.get());
        }
        if let Some(problem) = problem {
            panic!("{problem}");
        }
    }

    async fn bodies_paused(&mut self) {
        // Key 0 is taken over, and the duplicate of key 1 finds key 1 interrupted. Keys 2 and 3 have no duplicates.
        let stopped: Vec<_> = (0..4).map(|key| self.crew.start(key, Keys::Together(1), Work::Polled)).collect();
        self.crew
            .until("the bodies are polled", |lines| {
                let polled = |worker| lines.iter().any(|line| line.worker == worker && line.event == Event::Polled);
                stopped.iter().all(|worker| polled(*worker))
            })
            .await;
        // The processes stop for longer than a lease, so their leases lapse.
        for worker in &stopped {
            self.rig.stop(&self.crew, *worker).await;
        }
        tokio::time::sleep(2 * self.lease()).await;
        // Duplicates take over key 0, and get `Interrupted` for key 1.
        let successors = self.crew.start(0, Keys::Together(2), Work::Held);
        self.crew
            .until("duplicates have taken over key 0 and found key 1 interrupted", |lines| {
                let seen = [(0, Event::Held), (1, Event::Interrupted)];
                let of = |(key, event): &(usize, Event)| {
                    lines.iter().any(|line| line.worker == successors && line.key == *key && line.event == *event)
                };
                seen.iter().all(of)
            })
            .await;
        let woken = race::now();
        // The stopped processes continue: the body of key 0 loses its lease, and the other bodies go on.
        for worker in &stopped {
            self.crew.signal(*worker, "-CONT");
        }
        self.crew
            .until("the call for key 0 has lost its lease, and the other bodies go on", |lines| {
                let since = |worker: u32| lines.iter().filter(move |line| line.worker == worker && line.at > woken);
                let told = |worker| since(worker).any(|line| line.event.ends_a_call());
                let goes_on = |worker| since(worker).filter(|line| line.event == Event::Polled).count() > 3;
                told(stopped[0]) && stopped[1..].iter().all(|worker| goes_on(*worker))
            })
            .await;
        let told = self.told(stopped[0], 0);
        assert!(matches!(told[0], (_, Event::LeaseLost)), "{told:?}");
        let lines = self.crew.lines();
        let polled = |line: &&race::Line| line.worker == stopped[0] && line.call == 1 && line.event == Event::Polled;
        // The body of key 0 must not go on: at most one poll was under way when its process continued.
        let polls = lines.iter().filter(|line| line.at > woken).filter(polled).count();
        assert!(polls <= 1, "the body was polled {polls} times after its key had been taken over");
        let all = [&stopped[..], &[successors]].concat();
        self.ran_once(&all, 2..4, 4).await;
    }

    async fn lines_slow(&mut self) {
        let (held, replayed) = (2, 8);
        let (bytes, bytes_per_second) = self.rig.slow_line();
        self.crew.orders().bytes = bytes;
        self.crew.orders().lease = self.lease().max(Duration::from_secs(3));
        self.crew.start(held, Keys::Together(replayed), Work::Some);
        self.crew.ended().await;
        set_all(self.rig.lines(), Line::Slow(bytes_per_second));
        let since = race::now();
        let holder = self.hold(0, Keys::Beside(held, replayed), Work::Quiet, Place::One).await;
        tokio::time::sleep(3 * self.lease()).await;
        self.crew
            .until("results are replayed", |lines| {
                let told = |line: &&race::Line| line.worker == holder && line.event.ends_a_call();
                lines.iter().filter(told).count() >= 2 * replayed
            })
            .await;
        let told = self.told(holder, since);
        // The worker opens its first connections over the busy line. A call that fails while it waits for a connection
        // has not begun, and is repeated.
        let has_not_begun = |(key, event): &(usize, Event)| *key < held && matches!(event, Event::Store(_));
        let replayed_or_to_come = |it: &&(usize, Event)| matches!(it.1, Event::Replayed(_)) || has_not_begun(it);
        let lost: Vec<_> = told.iter().filter(|it| !replayed_or_to_come(it)).collect();
        assert!(lost.is_empty(), "of {} replays {} are lost: {lost:?}", told.len(), lost.len());
        self.ran_once(&[holder], 0..held, held + replayed).await;
    }

    async fn record_locked(&mut self) {
        self.crew.orders().lease = self.lease().max(self.rig.lease_of_locked());
        let holder = self.hold(0, Keys::Beside(HELD, 2), Work::Quiet, Place::One).await;
        let lease = self.lease();
        let (times, locked) = self.rig.locked_for(lease);
        for _ in 0..times {
            self.rig.break_down(Fault::record_locked).await;
            let since = race::now();
            tokio::time::sleep(locked).await;
            if self.rig.works_next_to_a_lock() {
                assert!(!self.told(holder, since).is_empty(), "the process that is locked out serves other keys");
            }
            self.rig.heal(Fault::record_locked).await;
            tokio::time::sleep(locked / 4).await;
        }
        self.ran_once(&[holder], 1..HELD + 2, HELD + 2).await;
    }

    async fn insert_uncommitted(&mut self) {
        // The open transaction inserts key 0. Of the other keys, some are held, some are replayed repeatedly, and some
        // begin during the fault.
        let (beside, all) = (2, 40);
        self.crew.orders().lease = self.lease().max(self.rig.lease_of_locked());
        self.rig.break_down(Fault::insert_uncommitted).await;
        let holder = self.crew.start(0, Keys::Beside(1 + HELD, beside), Work::Quiet);
        let begun = |key| move |line: &race::Line| line.key == key && matches!(line.event, Event::Began(_));
        let others = self.crew.start(0, Keys::Together(all), Work::Some);
        let (rig, crew) = (&self.rig, &self.crew);
        let go_on = async {
            crew.until("all other bodies have begun", |lines| (1..all).all(|key| lines.iter().any(begun(key)))).await;
            let since = race::now();
            crew.until("other results are replayed", |lines| {
                let replayed = |key| {
                    move |line: &race::Line| {
                        line.at > since && line.key == key && matches!(line.event, Event::Replayed(_))
                    }
                };
                (1 + HELD..1 + HELD + beside).all(|key| lines.iter().filter(|line| replayed(key)(line)).count() > 2)
            })
            .await;
        };
        without_waiting(rig, go_on).await;
        let lease = self.lease();
        without_waiting(&self.rig, tokio::time::sleep(3 * lease)).await;
        let told = [self.told(holder, 0), self.told(others, 0)].concat();
        let spared = |(key, event): &&(usize, Event)| {
            *key == 0 || matches!(event, Event::Ran(_) | Event::Replayed(_) | Event::InProgress)
        };
        assert_eq!(told.iter().find(|it| !spared(it)), None, "answers to calls for keys other than key 0");
        let of_the_insert = |(key, event): &&(usize, Event)| *key != 0 || *event == Event::InProgress;
        assert_eq!(
            told.iter().find(|it| !of_the_insert(it)),
            None,
            "answers to calls for key 0, which the open transaction inserts"
        );
        self.rig.heal(Fault::insert_uncommitted).await;
        self.ran_once(&[holder], 0..all, all).await;
    }

    async fn node_stopped(&mut self) {
        let (held, beside) = (2 * HELD, 2 * HELD);
        let healthy: Vec<usize> = (0..held + beside).filter(|key| self.rig.is_of_a_healthy_node(*key)).collect();
        let holder = self.hold(0, Keys::Beside(held, beside), Work::Quiet, Place::One).await;
        self.rig.break_down(Fault::node_stopped).await;
        let since = race::now();
        tokio::time::sleep(3 * self.lease()).await;
        let told = self.told(holder, since);
        for key in healthy.iter().filter(|key| **key >= held) {
            let goes_on = |(it, event): &(usize, Event)| it == key && matches!(event, Event::Replayed(_));
            assert!(told.iter().any(goes_on), "key {key} of a healthy node waits for the stopped node: {told:?}");
            let refused = |(it, event): &&(usize, Event)| it == key && !matches!(event, Event::Replayed(_));
            assert_eq!(told.iter().find(refused), None, "answers to calls for keys of healthy nodes");
        }
        self.rig.heal(Fault::node_stopped).await;
        self.ran_once(&[holder], healthy, held + beside).await;
    }

    async fn full_for_a_moment(&mut self) {
        self.crew.orders().lease = self.lease().max(Duration::from_secs(4));
        let mut keys = 0;
        for fault in self.rig.moments() {
            let holder = self.hold(keys, Keys::Together(HELD), Work::Quiet, Place::One).await;
            keys += HELD;
            self.rig.break_down(*fault).await;
            let since = race::now();
            self.crew.open_gate(holder);
            let ended = |line: &&race::Line| line.worker == holder && line.event == Event::Ended && line.at >= since;
            self.crew.until("the bodies have ended", |lines| lines.iter().filter(ended).count() == HELD).await;
            tokio::time::sleep(MOMENT).await;
            self.rig.heal(*fault).await;
            self.crew
                .until("the callers of these bodies have their answers", |lines| {
                    let told = |line: &&race::Line| line.worker == holder && line.event.ends_a_call();
                    lines.iter().filter(told).count() >= HELD
                })
                .await;
            let told = self.told(holder, 0);
            let recorded = |(_, event): &(usize, Event)| matches!(event, Event::Ran(_));
            assert!(told.iter().all(recorded), "{fault:?}: {told:?}");
        }
        self.ran_once(&[], 0..keys, keys).await;
    }

    async fn renewals_refused(&mut self) {
        let holder = self.hold(0, Keys::Together(HELD), Work::Quiet, Place::One).await;
        self.rig.break_down(Fault::renewals_refused).await;
        self.crew
            .until("every body ends", |lines| {
                let ended =
                    |key| move |line: &race::Line| (line.worker, line.key) == (holder, key) && line.event.ends_a_call();
                (0..HELD).all(|key| lines.iter().any(ended(key)))
            })
            .await;
        let told = self.told(holder, 0);
        for key in 0..HELD {
            let first = told.iter().find(|(of, _)| *of == key).map(|(_, event)| event);
            // Under `retry`, a duplicate may take over before the store's refusal reaches the first process.
            let taken_over = key % 2 == 0 && first == Some(&Event::LeaseLost);
            let unrenewed = first == Some(&Event::Unrenewed("Misconfigured".to_owned()));
            assert!(unrenewed || taken_over, "key {key}: {first:?}");
        }
        self.rig.heal(Fault::renewals_refused).await;
        // These bodies run for two leases, so their leases must be renewed.
        self.crew.start(HELD, Keys::Together(HELD), Work::Long);
        self.ran_once(&[holder], HELD..2 * HELD, 2 * HELD).await;
    }
}

/// Awaits `work`, and panics if a statement waits for the open transaction of `rig` meanwhile.
async fn without_waiting<T>(rig: &impl Rig, work: impl Future<Output = T>) -> T {
    let watch = async {
        loop {
            if let Some(statement) = rig.waits_for_the_insert().await {
                panic!("the statement waits for the open transaction, with all its keys: {statement}");
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        done = work => done,
        () = watch => unreachable!("the watching future never ends"),
    }
}

/// Asks the store at `spec` again and again, and keeps the time of its slowest answer.
async fn watch(spec: &str, slowest: &Cell<Duration>) {
    let store = stores::open(spec, Duration::from_secs(30)).await;
    loop {
        let asked = Instant::now();
        store.inspect(&Key::new("pace", 0).expect("a key")).await.ok();
        slowest.set(slowest.get().max(asked.elapsed()));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Makes some calls without a fault, and returns the duration of the longest one.
async fn longest_call(spec: &str) -> Duration {
    const LEASE: Duration = Duration::from_secs(30);
    const POLICY: Policy = Policy::new(Duration::from_secs(3600)).lease(LEASE);
    let store = stores::open(spec, LEASE).await;
    let mut longest = Duration::ZERO;
    for n in 0..10 {
        let asked = Instant::now();
        let operation = Operation::new(&*store, Key::new("pace", n), POLICY);
        operation.run(async { Ok::<_, Error>(n) }).await.expect("runs");
        longest = longest.max(asked.elapsed());
    }
    longest
}
