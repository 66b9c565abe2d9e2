//! Faults inside a worker's process: for a while it can start no thread, or open no descriptor.

use idem_tests::race::{self, Event, Keys, Place, Work};

use crate::leases::{HELD, Scene};
use crate::rigs::Rig;
use crate::tools::{allow_descriptors, allow_threads, take_descriptors, threads, without_threads};

/// Number of keys that the process serves repeatedly, in addition to the held keys.
const BESIDE: usize = 2;

impl<R: Rig> Scene<R> {
    /// Checks a process that can have only one thread from its start on.
    pub async fn threads_exhausted(&mut self) {
        self.rig.let_other_users_in();
        self.crew.set_wrapper(without_threads());
        if self.rig.opens_without_threads() {
            let holder = self.hold(0, Keys::Beside(HELD, BESIDE), Work::Quiet, Place::One).await;
            self.goes_on(holder, 2, "without threads").await;
            assert_eq!(threads(holder), 1);
            allow_threads(holder);
            self.ran_once(&[holder], 0..HELD, HELD + BESIDE).await;
        } else {
            let worker = self.crew.start(0, Keys::Together(HELD), Work::Some);
            self.crew.set_wrapper(Vec::new());
            let others = self.crew.start(HELD, Keys::Together(HELD), Work::Long);
            let done = |line: &&race::Line| line.worker == others && matches!(line.event, Event::Ran(_));
            self.crew
                .until("the other processes have served their keys", |lines| lines.iter().filter(done).count() == HELD)
                .await;
            assert_eq!(threads(worker), 1);
            assert!(
                self.crew.lines().iter().all(|line| line.worker != worker),
                "the worker makes no call, because its store needs a thread"
            );
            allow_threads(worker);
            self.ran_once(&[], 0..2 * HELD, 2 * HELD).await;
        }
    }

    /// Checks a process that runs out of descriptors while it holds bodies and serves other keys.
    pub async fn descriptors_exhausted(&mut self) {
        let holder = self.hold(0, Keys::Beside(HELD, BESIDE), Work::Quiet, Place::One).await;
        // After this wait, the connection for renewals exists.
        self.goes_on(holder, 1, "with descriptors").await;
        take_descriptors(holder);
        self.goes_on(holder, 2, "without descriptors").await;
        allow_descriptors(holder);
        self.ran_once(&[holder], 0..HELD, HELD + BESIDE).await;
    }

    /// Checks that `holder` serves keys for `leases` leases, and that its calls fail only with `Unavailable`.
    async fn goes_on(&mut self, holder: u32, leases: u32, how: &str) {
        let since = race::now();
        tokio::time::sleep(leases * self.lease()).await;
        self.crew
            .until(how, |lines| {
                let replayed = |line: &&race::Line| line.worker == holder && line.at > since;
                lines.iter().filter(replayed).any(|line| matches!(line.event, Event::Replayed(_)))
            })
            .await;
        let told = self.told(holder, since);
        let goes_on = |(_, event): &&(usize, Event)| {
            matches!(event, Event::Ran(_) | Event::Replayed(_)) || *event == Event::Store("Unavailable".to_owned())
        };
        assert_eq!(told.iter().find(|it| !goes_on(it)), None, "{how}");
    }
}
