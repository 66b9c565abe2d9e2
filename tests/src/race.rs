//! Processes that race for the same keys of one store, while one of them is killed again and again; and the audit.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command};
use std::time::Duration;

use idem_runtime::{Key, Payload, State, Store};

use crate::stores;

/// A race: `racers` processes work on all keys, one more is killed `kills` times, wherever it happens to be.
#[derive(Clone, Copy, Debug)]
pub struct Race<'a> {
    /// The program of a racer: `env!("CARGO_BIN_EXE_racer")`.
    pub program: &'a str,
    /// What [`stores::open`] opens.
    pub spec: &'a str,
    /// How many keys there are.
    pub keys: usize,
    /// How many processes reach the end.
    pub racers: usize,
    /// How many don't.
    pub kills: usize,
}

/// Which attempts took effect, for each key in the order of the effects.
#[derive(Debug)]
pub struct Effects(pub Vec<Vec<u32>>);

impl Effects {
    /// How many effects there are beyond one for each key.
    pub fn repeated(&self) -> usize {
        self.0.iter().map(|attempts| attempts.len() - 1).sum()
    }
}

impl<'a> Race<'a> {
    /// The race that every store is in: 8 processes, 1 000 keys.
    pub fn new(program: &'a str, spec: &'a str) -> Self {
        Self { program, spec, keys: 1000, racers: 7, kills: 12 }
    }

    /// Runs the race beside `meanwhile`, and audits it: every key took effect, attempts never overlapped, and nothing ran
    /// after the attempt that is recorded.
    pub async fn run(self, meanwhile: impl Future<Output = ()>) -> Effects {
        let path =
            std::env::temp_dir().join(format!("idem-race-{}-{}", std::process::id(), crate::server::free_port()));
        File::create(&path).expect("a file for the effects");
        let mut racers: Vec<Child> = (0..self.racers).map(|n| self.racer(&path, n * self.keys / self.racers)).collect();
        let kills = async {
            for kill in 0..self.kills {
                let mut victim = self.racer(&path, kill * self.keys / self.kills);
                tokio::time::sleep(Duration::from_millis(60)).await;
                victim.kill().expect("was running");
                victim.wait().expect("was running");
            }
        };
        tokio::join!(kills, meanwhile);
        let ended = tokio::task::spawn_blocking(move || {
            racers.iter_mut().all(|racer| racer.wait().expect("was running").success())
        });
        assert!(ended.await.expect("waited"), "a racer failed");
        let effects = self.audit(&*stores::open(self.spec).await, &path).await;
        std::fs::remove_file(&path).ok();
        effects
    }

    fn racer(&self, effects: &Path, begin: usize) -> Child {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", self.program, self.spec]).arg(effects);
        command.args([&self.keys.to_string(), &begin.to_string()]);
        command.spawn().expect("a racer starts")
    }

    async fn audit(&self, store: &dyn Store, path: &Path) -> Effects {
        let mut text = String::new();
        File::open(path).and_then(|mut file| file.read_to_string(&mut text)).expect("the effects can be read");
        let mut effects = vec![Vec::new(); self.keys];
        for line in text.lines() {
            let (n, attempt) = line.split_once(' ').expect("a key and an attempt");
            effects[n.parse::<usize>().expect("a key")].push(attempt.parse::<u32>().expect("an attempt"));
        }
        for (n, effects) in effects.iter().enumerate() {
            let recorded = store.inspect(&key(n)).await.expect("answers").expect("recorded").record;
            let State::Completed(Payload::Stored { bytes, .. }) = &recorded.state else { panic!("{n}: {recorded:?}") };
            let recorded: u32 = serde_json::from_slice(bytes).expect("an attempt");
            assert!(effects.is_sorted_by(|a, b| a < b), "{n}: attempts overlap: {effects:?}");
            assert_eq!(effects.last(), Some(&recorded), "{n}: something ran after the attempt that is recorded");
        }
        Effects(effects)
    }
}

/// The key that racers work on.
///
/// # Panics
/// Never: a number is a valid key.
pub fn key(n: usize) -> Key {
    Key::new("race", n).expect("a valid key")
}
