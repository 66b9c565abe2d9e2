//! One of several processes that race for the same keys; `idem_tests::race` starts and kills it.
//!
//! Arguments: store, table of effects, number of keys (or `open`), the key to begin with, and perhaps what the body does
//! (`nothing`, `some`, `held`).
#![allow(clippy::disallowed_methods)] // A consumer loop sleeps.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use idem_runtime::{
    Disposition, Error, InProgress, Json, Operation, Policy, Store, current, observe, record_values, run,
};
use idem_tests::race::{self, Event, Table};
use idem_tests::stores;

// Remembered for longer than the steps of any clock.
const POLICY: Policy = Policy::new(Duration::from_secs(48 * 3600))
    .lease(race::LEASE)
    .in_progress(InProgress::Wait(Duration::from_secs(2)));
const WORK: Duration = Duration::from_millis(10);
const PAUSE: Duration = Duration::from_millis(20);

struct Racer {
    store: Arc<dyn Store>,
    path: PathBuf,
    table: Table,
    works: bool,
    /// Whether the next body waits for the gate.
    held: bool,
    calls: u32,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [spec, path, keys, begin, work @ ..] = &args[..] else { panic!("store, effects, number of keys, first key") };
    let path = PathBuf::from(path);
    let mut keys: Option<usize> = (keys != "open").then(|| keys.parse().unwrap());
    let begin: usize = begin.parse().unwrap();
    let work = work.first().map_or("nothing", String::as_str);
    let store = stores::open(spec).await;
    let table = Table::open(&path);
    let mut racer = Racer { store, path, table, works: work != "nothing", held: work == "held", calls: 0 };
    let mut n = begin;
    loop {
        keys = keys.or_else(|| racer.told_how_many());
        if keys.is_some_and(|keys| n >= keys) {
            break;
        }
        racer.serve(n).await;
        n += 1;
    }
    for n in 0..begin {
        racer.serve(n).await;
    }
}

impl Racer {
    fn told_how_many(&self) -> Option<usize> {
        std::fs::read_to_string(race::beside(&self.path, "keys")).ok()?.parse().ok()
    }

    /// Delivers the message until it is acknowledged.
    async fn serve(&mut self, n: usize) {
        loop {
            self.calls += 1;
            self.table.write(self.calls, n, Event::Asked);
            let (told, disposition) = self.call(n).await;
            self.table.write(self.calls, n, told);
            match disposition {
                Disposition::Ack => break,
                Disposition::Retry { .. } => tokio::time::sleep(PAUSE).await,
                Disposition::DeadLetter => panic!("key {n}"),
            }
        }
    }

    async fn call(&mut self, n: usize) -> (Event, Disposition) {
        let Self { store, path, table, works, held, calls } = self;
        let (call, gate) = (*calls, race::gate(path, std::process::id()));
        let operation = Operation::new(&**store, Ok(race::key(n)), POLICY);
        let body = async {
            let attempt = current().unwrap();
            table.write(call, n, Event::Began(attempt.number()));
            if *works {
                tokio::time::sleep(WORK).await;
            }
            if std::mem::take(held) {
                while !gate.exists() {
                    let asked = race::now();
                    if attempt.confirm_lease().await.is_ok() {
                        table.write_as_of(asked, call, n, Event::Held);
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
            table.write(call, n, Event::Ended);
            Ok::<_, Error>(race::result(attempt.number(), std::process::id(), call))
        };
        let (result, outcome) = observe(run(operation, record_values::<Json>(), body)).await;
        let told = match result {
            Ok(result) if outcome.replayed() => Event::Replayed(result),
            Ok(result) => Event::Ran(result),
            Err(Error::LeaseLost { .. }) => Event::LeaseLost,
            Err(Error::Unrecorded { .. }) => Event::Unrecorded,
            Err(Error::InProgress { .. }) => Event::InProgress,
            Err(Error::Store { source, .. }) => Event::Store(format!("{:?}", source.kind())),
            Err(error) => panic!("key {n}: {error}"),
        };
        (told, outcome.disposition())
    }
}
