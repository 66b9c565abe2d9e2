//! Course of a test of a fault: processes ("racers") serve keys, the test causes the fault and checks the racers'
//! answers, the fault ends, and the audit compares effects and records.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use idem_tests::proxy::{Line, Proxy};
use idem_tests::race::{self, Crew, Event, Keys, Policies, Rules, STEPS, Work};
use idem_tests::server::until;

use crate::rigs::{Rig, set_all};
use crate::tools::WallClock;
use crate::{Fault, VisibleEffect, leases, messages};

/// Number of keys that workers must have served before the store counts as working.
const PROGRESS: usize = 5;
/// Seconds by which a test sets a worker's clock ahead of the right time, and then behind it.
const STEP: i64 = 3600;
const DELAY: Duration = Duration::from_millis(100);
/// Number of keys that a worker begins concurrently after the server is stopped.
const GATED: usize = 24;
/// First key of the bodies that run while the server is stopped, after the keys of the gated workers.
const CUT_OFF: usize = 1 + 2 * (1 + GATED);
/// Number of bodies that run while the server is stopped, one for each policy.
const POLICIES: usize = 3;

/// First key of the workers that are killed or stopped in a step. An even key has steps.
const IN_STEP: usize = 2;
/// Number of workers that are killed in a step.
const VICTIMS: usize = 4;
/// Longest wait for a worker that is about to be killed.
const PATIENCE: Duration = Duration::from_secs(120);

fn kills_in_steps(fault: Fault) -> bool {
    matches!(fault, Fault::steps_killed_before_their_entries | Fault::steps_killed_in_their_entries)
}

/// Causes `fault` in `rig` while racers work, and checks for the visible effect `seen`.
pub async fn play(rig: impl Rig, fault: Fault, seen: VisibleEffect) {
    let is_of_messages = matches!(
        seen,
        VisibleEffect::Sent | VisibleEffect::SentAgain | VisibleEffect::SetAside | VisibleEffect::Unsent
    );
    if is_of_messages {
        return messages::play(rig, fault).await;
    }
    let is_of_the_process = matches!(fault, Fault::threads_exhausted | Fault::descriptors_exhausted);
    if is_of_the_process
        || matches!(
            seen,
            VisibleEffect::Kept
                | VisibleEffect::OthersKept
                | VisibleEffect::Fenced
                | VisibleEffect::Recorded
                | VisibleEffect::Unrenewed
        )
    {
        return leases::play(rig, fault).await;
    }
    let clock = WallClock::new();
    let mut scene = Scene::open(rig, fault, &clock).await;
    let rules = match seen {
        VisibleEffect::TakenOver => scene.kill_workers().await,
        VisibleEffect::Continued => scene.kill_in_steps(fault).await,
        VisibleEffect::LeaseLost => scene.stop_workers().await,
        VisibleEffect::Refused if fault == Fault::server_stopped_and_continued => scene.is_stopped().await,
        VisibleEffect::Refused => scene.is_refused(fault).await,
        VisibleEffect::Retried => scene.is_retried(fault).await,
        VisibleEffect::RunsAgain => scene.is_forgotten(fault).await,
        VisibleEffect::Slower => scene.is_slower().await,
        VisibleEffect::GoesOn if fault == Fault::connections_half_closed => scene.goes_on_elsewhere().await,
        VisibleEffect::GoesOn => scene.clock_is_stepped(&clock, false).await,
        VisibleEffect::LeasesMove => scene.clock_is_stepped(&clock, true).await,
        _ => unreachable!("{seen:?} is about leases or messages"),
    };
    scene.close(fault, &rules).await;
}

/// Racers at work: one holds key 0 until [`Scene::close`], and the others serve key after key.
struct Scene<R> {
    rig: R,
    crew: Crew,
    holder: u32,
    others: [u32; 2],
}

/// Lines that the racers have written about their calls, with queries about calls.
struct Seens<'a>(&'a [race::Line]);

impl Seens<'_> {
    /// Returns the lines about the course and the end of calls that began after `since`.
    fn told_since(&self, since: u64) -> impl Iterator<Item = &race::Line> {
        let asked: HashMap<_, _> = self
            .0
            .iter()
            .filter(|line| line.event == Event::Asked)
            .map(|line| ((line.worker, line.call), line.at))
            .collect();
        self.0.iter().filter(move |line| line.event != Event::Asked && asked[&(line.worker, line.call)] > since)
    }

    fn ran_since(&self, since: u64) -> usize {
        self.told_since(since).filter(|line| matches!(line.event, Event::Ran(_))).count()
    }

    fn last_of(&self, worker: u32) -> Option<&race::Line> {
        self.0.iter().rev().find(|line| line.worker == worker)
    }

    /// Reports whether the latest body of `worker` has ended and its result is not recorded yet.
    fn is_recording(&self, worker: u32) -> bool {
        let of_worker = self.0.iter().rev().filter(|line| line.worker == worker);
        let waits = |event: &Event| matches!(event, Event::Asked | Event::InProgress | Event::Unrecorded);
        of_worker.map(|line| &line.event).find(|event| !waits(event)) == Some(&Event::Ended)
    }

    /// Reports whether the worker's call has ended before its result was recorded, and the worker still writes the
    /// result.
    fn is_recording_late(&self, worker: u32) -> bool {
        self.is_recording(worker) && self.last_of(worker).is_some_and(|line| line.event != Event::Ended)
    }

    /// Number of effects of this step.
    fn effects(&self, key: usize, step: &str) -> usize {
        let is_made = |event: &Event| matches!(event, Event::StepMade(name, _) if name == step);
        self.0.iter().filter(|line| line.key == key && is_made(&line.event)).count()
    }

    /// Reports whether the store answered every write for this key. On a busy machine a store may miss its time limit,
    /// and then a step without a confirmed entry may run again.
    fn always_answers(&self, key: usize) -> bool {
        let is_failure =
            |event: &Event| matches!(event, Event::Store(_) | Event::Unrecorded | Event::StepUnconfirmed(_));
        !self.0.iter().any(|line| line.key == key && is_failure(&line.event))
    }

    /// Number of keys about which `worker` has written such a line.
    fn keys_of(&self, worker: u32, is: impl Fn(&race::Line) -> bool) -> usize {
        let lines = self.0.iter().filter(|line| line.worker == worker && is(line));
        lines.map(|line| line.key).collect::<HashSet<_>>().len()
    }

    /// Number of calls of `worker` after `since` that the store refused.
    fn refused_since(&self, since: u64, worker: u32) -> usize {
        let refused = |line: &&race::Line| line.worker == worker && matches!(line.event, Event::Store(_));
        self.told_since(since).filter(refused).count()
    }
}

impl<R: Rig> Scene<R> {
    async fn open(rig: R, fault: Fault, clock: &WallClock) -> Self {
        let mut crew = Crew::new(env!("CARGO_BIN_EXE_racer"), &rig.spec());
        let server_stops = fault == Fault::server_stopped_and_continued;
        crew.orders().policies = if server_stops { Policies::Limited } else { Policies::Mixed };
        crew.orders().steps = true;
        // Smaller keys are left for further workers, which begin these keys during the fault.
        let first = match fault {
            Fault::server_stopped_and_continued => CUT_OFF + POLICIES,
            _ if kills_in_steps(fault) => IN_STEP + 2 * VICTIMS,
            Fault::workers_stopped_and_continued => IN_STEP + 1,
            _ => 1,
        };
        let steps = matches!(fault, Fault::clock_stepped | Fault::clock_stepped_within_the_skew);
        let stepped = if steps { clock.env() } else { rig.env() };
        let right = if rig.clock_of_the_host() { stepped.clone() } else { rig.env() };
        crew.set_env(right);
        if fault == Fault::connections_delayed {
            // The lease is long, because opening a connection takes several round trips over the slow line.
            crew.orders().lease = 30 * DELAY;
        }
        let holder = crew.start(0, Keys::Open, Work::Held);
        let one = crew.start(first, Keys::Open, Work::Some);
        crew.set_env(stepped);
        let two = crew.start(first, Keys::Open, Work::Some);
        let scene = Self { rig, crew, holder, others: [one, two] };
        scene
            .until("all workers serve keys", |seen| {
                let holds = seen.0.iter().any(|line| line.worker == holder && line.event == Event::Held);
                let ran = |line: &race::Line| matches!(line.event, Event::Ran(_) | Event::Replayed(_));
                let at_work = |worker| seen.0.iter().any(|line| line.worker == worker && ran(line));
                holds && at_work(one) && at_work(two) && seen.ran_since(0) >= PROGRESS
            })
            .await;
        scene
    }

    async fn until(&self, what: &str, mut condition: impl FnMut(&Seens) -> bool) {
        self.crew.until(what, |lines| condition(&Seens(lines))).await;
    }

    /// Waits until workers have served [`PROGRESS`] keys in calls that they begin from now on.
    async fn progress(&self, what: &str) {
        let now = race::now();
        self.until(what, |seen| seen.ran_since(now) >= PROGRESS).await;
    }

    /// Waits until the store has failed for every worker, in calls made from now on. A worker whose body has ended gets
    /// no answer: it repeats the write of the result for as long as its lease can be renewed. Even after the call has
    /// ended with `Unrecorded`, its process repeats the write, and further calls for the key get `InProgress`.
    async fn told(&self) {
        let now = race::now();
        self.until("the store refuses the calls of all workers", |seen| {
            let refused = self.others.map(|worker| seen.refused_since(now, worker) > 0);
            let stuck = |(worker, refused): (&u32, &bool)| *refused || seen.is_recording(*worker);
            // A worker that is just about to record a result does not show that the store fails.
            let failed = refused.contains(&true) || self.others.iter().all(|worker| seen.is_recording_late(*worker));
            failed && self.others.iter().zip(&refused).all(stuck)
        })
        .await;
    }

    /// Ends the race. After a fault of a server, the holder of key 0 is killed first: the next attempt must get the
    /// value of the step that the holder had journaled before the fault.
    async fn close(mut self, fault: Fault, rules: &Rules) {
        if matches!(fault, Fault::server_killed_and_restarted | Fault::server_stopped_and_continued | Fault::failover) {
            self.crew.kill(self.holder);
            let successor = self.crew.start(0, Keys::Open, Work::Some);
            let (holder, first) = (self.holder, STEPS[0]);
            let has_value = |seen: &Seens, of| {
                let is_kept = |event: &Event| matches!(event, Event::StepKept(step, _) if step == first);
                seen.0.iter().any(|line| line.worker == of && line.key == 0 && is_kept(&line.event))
            };
            self.until("the successor of the holder continues after its journaled step", |seen| {
                assert!(has_value(seen, holder), "the holder had journaled its step before the fault");
                has_value(seen, successor)
            })
            .await;
        } else {
            self.crew.open_gate(self.holder);
        }
        let keys = self.crew.finish();
        self.crew.ended().await;
        let effects = self.crew.audit(keys, rules).await;
        println!("{keys} keys, {} effects beyond one for each", effects.repeated());
    }

    async fn kill_workers(&mut self) -> Rules {
        for _ in 0..3 {
            let victim = self.crew.start(1, Keys::Open, Work::Some);
            let began = |line: &race::Line| line.worker == victim && matches!(line.event, Event::Began(_));
            self.until("a body runs", |seen| seen.0.iter().any(began)).await;
            self.crew.kill(victim);
        }
        self.crew.kill(self.holder);
        let successor = self.crew.start(0, Keys::Open, Work::Some);
        let took_over = |line: &race::Line| {
            line.worker == successor && line.key == 0 && matches!(line.event, Event::Ran(_) | Event::Replayed(_))
        };
        self.until("the key of the killed worker is taken over", |seen| seen.0.iter().any(took_over)).await;
        self.progress("the others go on").await;
        Rules::STRICT
    }

    /// Kills workers in the last steps of their bodies, each on its own key. Then another worker serves these keys.
    async fn kill_in_steps(&mut self, fault: Fault) -> Rules {
        let [first, last] = STEPS;
        let is_before = fault == Fault::steps_killed_before_their_entries;
        // Even keys have steps.
        let keys: Vec<usize> = (0..VICTIMS).map(|victim| IN_STEP + 2 * victim).collect();
        for (victim, key) in keys.iter().enumerate() {
            // By turns the racer waits in the write of its entry, or is killed some moment after its effect.
            let work = match is_before {
                true => Work::InStep,
                false if victim % 2 == 0 => Work::InEntry,
                false => Work::Some,
            };
            let victim = self.crew.start(*key, Keys::Together(1), work);
            let is_there = |event: &Event| match (work, event) {
                (Work::InEntry, Event::StepSent(step)) | (Work::InStep | Work::Some, Event::StepMade(step, _)) => {
                    step == last
                }
                _ => false,
            };
            let began = Instant::now();
            // For `Work::Some` without a pause between two looks: a store writes an entry within a millisecond.
            while !self.crew.lines().iter().any(|line| line.worker == victim && is_there(&line.event)) {
                assert!(began.elapsed() < PATIENCE, "the worker is in its step");
                if work != Work::Some {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            }
            self.crew.kill(victim);
        }
        let successor = self.crew.start(IN_STEP, Keys::Together(2 * VICTIMS), Work::Some);
        self.until("the keys of the killed workers are taken over", |seen| {
            let ended = |line: &&race::Line| line.worker == successor && line.event.is_final();
            seen.0.iter().filter(ended).count() >= 2 * VICTIMS
        })
        .await;
        let lines = self.crew.lines();
        let seen = Seens(&lines);
        let mut repeated = 0;
        for key in keys.into_iter().filter(|key| seen.always_answers(*key)) {
            let effects = [first, last].map(|step| seen.effects(key, step));
            let is_possible =
                |effects: [usize; 2]| if is_before { effects == [1, 2] } else { matches!(effects, [1, 1 | 2]) };
            assert!(is_possible(effects), "key {key}: the steps had {effects:?} effects");
            repeated += effects[1] - 1;
        }
        println!("{repeated} of {VICTIMS} interrupted steps ran again");
        self.progress("the others go on").await;
        Rules::STRICT
    }

    async fn stop_workers(&mut self) -> Rules {
        let zombie = self.crew.start(IN_STEP, Keys::Together(1), Work::InStep);
        let [first, last] = STEPS;
        self.until("a worker is in its last step", |seen| {
            let is_made = |event: &Event| matches!(event, Event::StepMade(step, _) if step == last);
            seen.0.iter().any(|line| line.worker == zombie && is_made(&line.event))
        })
        .await;
        self.rig.stop(&self.crew, zombie).await;
        self.rig.stop(&self.crew, self.holder).await;
        self.rig.stop(&self.crew, self.others[0]).await;
        // The gate of the stopped step opens, so that the step requests its entry as soon as its process continues.
        self.crew.open_gate(zombie);
        let stepper = self.crew.start(IN_STEP, Keys::Together(1), Work::InStep);
        let successor = self.crew.start(0, Keys::Open, Work::Held);
        let (holder, of_key_0) = (self.holder, |line: &&race::Line| line.key == 0);
        self.until("the key of the stopped worker is taken over", |seen| {
            seen.0.iter().filter(of_key_0).any(|line| line.worker == successor && line.event == Event::Held)
        })
        .await;
        self.progress("the others go on").await;
        // Two bodies of key 0 have begun now. The gate of the stopped holder opens, so that the holder's body ends as
        // soon as its process continues.
        self.crew.open_gate(self.holder);
        self.until("the key of the stopped step is taken over, and its last step is made", |seen| {
            let is_made = |event: &Event| matches!(event, Event::StepMade(step, _) if step == last);
            seen.0.iter().any(|line| line.worker == stepper && is_made(&line.event))
        })
        .await;
        for worker in [zombie, self.holder, self.others[0]] {
            self.crew.signal(worker, "-CONT");
        }
        // The call that was stopped; earlier calls may have failed.
        let stopped_call = |seen: &Seens| {
            let is_made = |event: &Event| matches!(event, Event::StepMade(step, _) if step == last);
            seen.0.iter().find(|line| line.worker == zombie && is_made(&line.event)).map(|line| line.call)
        };
        self.until("the store refuses the entry of the step that was stopped", |seen| {
            let call = stopped_call(seen);
            let of_call = |line: &&race::Line| line.worker == zombie && Some(line.call) == call;
            let is_kept = |event: &Event| matches!(event, Event::StepKept(step, _) if step == last);
            assert!(!seen.0.iter().filter(of_call).any(|line| is_kept(&line.event)), "the store took the entry");
            let refused = Event::StepRefused(last.to_owned());
            // On a busy machine the refusal may come later than the time limit of the store.
            let unconfirmed = Event::StepUnconfirmed(last.to_owned());
            seen.0.iter().filter(of_call).any(|line| line.event == refused || line.event == unconfirmed)
        })
        .await;
        // The last step has no entry, so the attempt after the next one makes its effect again.
        self.crew.kill(stepper);
        self.crew.start(IN_STEP, Keys::Together(1), Work::Some);
        self.until("the key of the stopped step has its result", |seen| {
            seen.0.iter().any(|line| line.key == IN_STEP && line.event.is_final())
        })
        .await;
        let lines = self.crew.lines();
        let seen = Seens(&lines);
        let effects = [first, last].map(|step| seen.effects(IN_STEP, step));
        // Three attempts make the effect of the last step, and two of them end before its entry.
        assert!(effects == [1, 3] || !seen.always_answers(IN_STEP), "the steps had {effects:?} effects");
        let told = |seen: &Seens| {
            let held = |line: &&race::Line| line.worker == holder && line.event == Event::Held;
            let call = seen.0.iter().find(held)?.call;
            let told = |line: &&race::Line| line.worker == holder && line.call == call && line.event.ends_a_call();
            seen.0.iter().find(told).map(|line| line.event.clone())
        };
        self.until("the worker that was stopped gets an answer", |seen| told(seen).is_some()).await;
        let told = told(&Seens(&self.crew.lines()));
        assert!(told.as_ref().is_some_and(Event::is_lease_lost), "the stopped call was taken over: {told:?}");
        self.crew.open_gate(successor);
        for (worker, ran) in [(successor, true), (holder, false)] {
            self.until("both workers have the result of the worker that was not stopped", |seen| {
                let told = |line: &race::Line| match line.event {
                    Event::Ran(_) => ran,
                    Event::Replayed(_) => !ran,
                    _ => false,
                };
                seen.0.iter().filter(of_key_0).any(|line| line.worker == worker && told(line))
            })
            .await;
        }
        Rules::STRICT
    }

    async fn is_refused(&mut self, fault: Fault) -> Rules {
        if fault == Fault::connections_cut {
            // The lines lose the answer, or a part of it, or the request: the client can't know whether a request took
            // effect.
            for line in [Line::ResetOnReply, Line::LoseReplies, Line::LoseRequests] {
                set_all(self.rig.lines(), line);
                self.told().await;
                set_all(self.rig.lines(), Line::Pass);
                self.progress(&format!("all goes on after {line:?}")).await;
            }
        }
        self.rig.break_down(fault).await;
        self.told().await;
        let begun = |seen: &Seens| seen.0.iter().filter(|line| matches!(line.event, Event::Began(_))).count();
        let mut ends = false;
        for _ in 0..if fault == Fault::disk_full && self.rig.fills_up_slowly() { 20 } else { 1 } {
            let before = begun(&Seens(&self.crew.lines()));
            self.told().await;
            ends = begun(&Seens(&self.crew.lines())) == before;
            if ends {
                break;
            }
        }
        assert!(ends, "bodies run although their keys can't be reserved");
        self.rig.heal(fault).await;
        self.progress("all goes on after the fault").await;
        Rules::STRICT
    }

    /// Stops the server for more than four leases. Two workers begin keys meanwhile, and one of them is killed. When
    /// the server continues, it executes the requests of both workers. The bodies of a third worker run when the server
    /// is stopped, and are cancelled meanwhile.
    async fn is_stopped(&mut self) -> Rules {
        let fault = Fault::server_stopped_and_continued;
        let victim = self.crew.start(1, Keys::Gated(GATED), Work::Some);
        let survivor = self.crew.start(2 + GATED, Keys::Gated(GATED), Work::Some);
        let cut_off = self.crew.start(CUT_OFF, Keys::Together(POLICIES), Work::Quiet);
        self.until("two workers have served a key and wait at their gates, and the bodies of the third run", |seen| {
            let is_ready = |worker| seen.last_of(worker).is_some_and(|line| matches!(line.event, Event::Ran(_)));
            let run = seen.keys_of(cut_off, |line| matches!(line.event, Event::Began(_)));
            is_ready(victim) && is_ready(survivor) && run == POLICIES
        })
        .await;
        self.rig.break_down(fault).await;
        let from = race::now();
        self.until("the time has advanced, so that later calls have later times", |_| race::now() > from).await;
        for worker in [victim, survivor] {
            self.crew.open_gate(worker);
        }
        self.until("both workers have requested all their keys, and the store refuses the survivor's calls", |seen| {
            let asked = |worker| seen.keys_of(worker, |line| line.event == Event::Asked && line.at > from) >= GATED;
            asked(victim) && asked(survivor) && seen.refused_since(from, survivor) >= GATED
        })
        .await;
        self.crew.kill(victim);
        self.told().await;
        let begun = |seen: &Seens| seen.0.iter().filter(|line| matches!(line.event, Event::Began(_))).count();
        let before = begun(&Seens(&self.crew.lines()));
        // A body is cancelled after the lease and a pause of three leases. The requests to free its key are still under
        // way when the server continues.
        self.until("the bodies whose leases could not be renewed are cancelled", |seen| {
            seen.keys_of(cut_off, |line| matches!(line.event, Event::Unrenewed(_))) == POLICIES
        })
        .await;
        let to = race::now();
        assert_eq!(begun(&Seens(&self.crew.lines())), before, "bodies begin although no server answers");
        self.crew.open_gate(cut_off);
        self.rig.heal(fault).await;
        self.progress("all goes on after the fault").await;
        Rules { stopped: Some((from, to)), ..Rules::STRICT }
    }

    async fn is_retried(&mut self, fault: Fault) -> Rules {
        self.rig.break_down(fault).await;
        self.progress("all goes on after the fault").await;
        self.rig.heal(fault).await;
        Rules::STRICT
    }

    async fn is_forgotten(&mut self, fault: Fault) -> Rules {
        let from = race::now();
        self.rig.break_down(fault).await;
        if fault == Fault::table_removed {
            self.told().await;
        }
        self.rig.heal(fault).await;
        let to = race::now();
        let holder = self.holder;
        self.until("the running attempt learns that its lease is lost", |seen| {
            seen.0.iter().any(|line| line.worker == holder && line.key == 0 && line.event.is_lease_lost())
        })
        .await;
        self.crew.start(1, Keys::Open, Work::Some);
        self.until("a finished operation runs again", |seen| {
            let ran = |line: &race::Line| line.at < from && matches!(line.event, Event::Ran(_));
            let ran = |key| seen.0.iter().any(|line| line.key == key && ran(line));
            seen.told_since(to).any(|line| matches!(line.event, Event::Ran(_)) && ran(line.key))
        })
        .await;
        Rules { forgotten: Some((from, to)), ..Rules::STRICT }
    }

    async fn is_slower(&mut self) -> Rules {
        set_all(self.rig.lines(), Line::Delay(DELAY));
        let now = race::now();
        self.progress("all goes on meanwhile").await;
        let lines = self.crew.lines();
        let seen = Seens(&lines);
        let there_and_back = 2 * u64::try_from(DELAY.as_millis()).expect("short");
        for line in seen.told_since(now).filter(|line| matches!(line.event, Event::Ran(_))) {
            let asked = |it: &&race::Line| (it.worker, it.call) == (line.worker, line.call);
            let took = line.at - seen.0.iter().find(asked).expect("asked").at;
            assert!(took + 20 > 2 * there_and_back, "a reservation and a completion took {took} ms");
        }
        set_all(self.rig.lines(), Line::Pass);
        self.progress("all goes on afterwards").await;
        Rules::STRICT
    }

    async fn goes_on_elsewhere(&mut self) -> Rules {
        for line in [Line::EndToClient, Line::EndToServer] {
            let halved = || self.rig.lines().iter().map(Proxy::halved).sum::<usize>();
            let before = halved();
            set_all(self.rig.lines(), line);
            until("connections are half closed", async || halved() > before).await;
            self.progress(&format!("all goes on with {line:?}")).await;
            set_all(self.rig.lines(), Line::Pass);
            self.progress(&format!("all goes on after {line:?}")).await;
        }
        Rules::STRICT
    }

    async fn clock_is_stepped(&mut self, clock: &WallClock, leases_move: bool) -> Rules {
        let true_time = wall_of(&SystemTime::now()) - i64::try_from(race::now()).expect("soon");
        let stepped = self.others[1];
        for step in [STEP, -STEP] {
            clock.step(step);
            // A duplicate waits for the running attempt.
            let duplicate = self.crew.start(0, Keys::Open, Work::Some);
            let (now, wanted) = (race::now(), step * 1000);
            self.until("a body runs under the changed clock", |seen| {
                seen.told_since(now).any(|line| {
                    let off = i64::try_from(line.wall).expect("the clock shows a time after 1970")
                        - i64::try_from(line.at).expect("soon")
                        - true_time;
                    line.worker == stepped && matches!(line.event, Event::Began(_)) && (off - wanted).abs() < 60_000
                })
            })
            .await;
            if !leases_move {
                self.until("the duplicate's call ends in spite of the changed clock", |seen| {
                    seen.0.iter().any(|line| line.worker == duplicate && line.key == 0 && line.event.ends_a_call())
                })
                .await;
            }
            self.progress("all goes on meanwhile").await;
        }
        clock.step(0);
        Rules { leases: !leases_move, ..Rules::STRICT }
    }
}

fn wall_of(time: &SystemTime) -> i64 {
    i64::try_from(time.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis())
        .expect("the clock shows a time after 1970")
}
